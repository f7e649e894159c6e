"""Measures `mcore-ckpt inspect`, as a whole process, for a checkpoint of 1 TB with 100,000 chunks.

    python benchmarks/inspect_metadata.py

The metadata is that of a 70B model saved in `dp_reshardable` by TP4 x PP8 x VPP10 x DP100, written with torch's own
classes as Megatron 0.16 writes it, including the plans of all ranks. The tensors are holes in sparse files, which are
never read.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from mcore_ckpt_ext.layout.grad_buffer import BufferParameter, pack

GOAL_SECONDS, GOAL_MEBIBYTES = 1.0, 300
TENSOR, PIPELINE, VIRTUAL, DATA = 4, 8, 10, 100
LAYERS, HIDDEN, FEED_FORWARD, QUERY_GROUPS, HEADS, VOCABULARY = 80, 8192, 28672, 8, 64, 128_256
ARCHIVE_OVERHEAD = 1500
# Key, shape, sharded axis; in registration order.
LAYER = (
    ("self_attention.linear_proj.weight", (HIDDEN, HIDDEN), 1),
    ("self_attention.linear_qkv.layer_norm_weight", (HIDDEN,), None),
    ("self_attention.linear_qkv.weight", (HIDDEN + 2 * QUERY_GROUPS * HIDDEN // HEADS, HIDDEN), 0),
    ("mlp.linear_fc1.layer_norm_weight", (HIDDEN,), None),
    ("mlp.linear_fc1.weight", (2 * FEED_FORWARD, HIDDEN), 0),
    ("mlp.linear_fc2.weight", (HIDDEN, FEED_FORWARD), 1),
)
FIRST = (("embedding.word_embeddings.weight", (VOCABULARY, HIDDEN), 0),)
LAST = (("decoder.final_layernorm.weight", (HIDDEN,), None), ("output_layer.weight", (VOCABULARY, HIDDEN), 0))


class _Writer:
    """Collects the metadata of a save, and makes the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Any] = {}
        self.storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
        self.plans: dict[int, list[WriteItem]] = {}
        self.ends: dict[str, int] = {}
        self.objects: list[tuple[str, int, bytes]] = []

    def chunk(self, key: str, shape: tuple[int, ...], dtype: torch.dtype, offsets: Any, sizes: Any, rank: int) -> None:
        """Add one chunk of an array, written by a rank."""
        properties = dcp.TensorProperties(dtype=dtype)
        entry = self.entries.setdefault(key, dcp.TensorStorageMetadata(properties, torch.Size(shape), []))
        chunk = dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        entry.chunks.append(chunk)
        numel = chunk.sizes.numel()
        self._place(dcp.MetadataIndex(key, chunk.offsets), rank, numel * dtype.itemsize + ARCHIVE_OVERHEAD)
        again = dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(again, dcp.TensorProperties(dtype=dtype), torch.Size(shape))
        item = WriteItem(dcp.MetadataIndex(key, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)
        self.plans.setdefault(rank, []).append(item)

    def object(self, key: str, value: Any, rank: int) -> None:
        """Add a pickled object, whose bytes are written."""
        buffer = io.BytesIO()
        torch.save([value], buffer)
        data = buffer.getvalue()
        self.entries[key] = dcp.BytesStorageMetadata()
        file, offset = self._place(dcp.MetadataIndex(key), rank, len(data))
        self.objects.append((file, offset, data))

    def finish(self, common: dict[str, Any]) -> None:
        """Write the files."""
        for file, end in self.ends.items():
            (self.folder / file).touch()
            os.truncate(self.folder / file, end)
        for file, offset, data in self.objects:
            with (self.folder / file).open("r+b") as stream:
                stream.seek(offset)
                stream.write(data)
        metadata = dcp.Metadata(self.entries, storage_data=self.storage)
        metadata.all_local_plans = [  # type: ignore[attr-defined]  # as Megatron adds them
            SavePlan(self.plans.get(rank, [])) for rank in range(TENSOR * PIPELINE * DATA)
        ]
        (self.folder / ".metadata").write_bytes(pickle.dumps(metadata))
        torch.save(common, self.folder / "common.pt")
        (self.folder / "metadata.json").write_text(
            '{"sharded_backend": "torch_dist", "sharded_backend_version": 1,'
            ' "common_backend": "torch", "common_backend_version": 1}'
        )

    def _place(self, index: dcp.MetadataIndex, rank: int, length: int) -> tuple[str, int]:
        file = f"__{rank}_0.distcp"
        offset = self.ends.get(file, 0)
        self.ends[file] = offset + length
        self.storage[index] = _StorageInfo(file, offset, length)
        return file, offset


def _chunks_of_model() -> Iterator[tuple[int, int, list[tuple[str, tuple[int, ...], int | None, int | None]]]]:
    """Yield pipeline rank, virtual stage, and its parameters: key, shape, sharded axis, layer."""
    layer = 0
    for stage in range(VIRTUAL):
        for pipeline in range(PIPELINE):
            named: list[tuple[str, tuple[int, ...], int | None, int | None]] = []
            if layer == 0:
                named += [(*item, None) for item in FIRST]
            named += [(f"decoder.layers.{key}", shape, cut, layer) for key, shape, cut in LAYER]
            layer += 1
            if layer == LAYERS:
                named += [(*item, None) for item in LAST]
            yield pipeline, stage, named


def make_checkpoint(folder: Path) -> int:
    """Write the metadata of the checkpoint, and return the number of chunks."""
    folder.mkdir(parents=True)
    writer = _Writer(folder)
    numels: dict[int, list[dict[Any, list[int]]]] = {}
    dtypes = (torch.bfloat16, torch.float32)
    for pipeline, stage, named in _chunks_of_model():
        for tensor in range(TENSOR):
            _add_weights(writer, pipeline, tensor, named)
        local = [torch.Size(shape).numel() // (TENSOR if cut is not None else 1) for _, shape, cut, _ in named]
        (bucket,) = pack([BufferParameter(numel) for numel in local], bucket_size=None, data_parallel=DATA)
        numels.setdefault(pipeline, []).append({dtypes: [bucket.numel_unpadded]})
        shard = (bucket.stop - bucket.start) // DATA
        borders = {border for _, low, high in bucket.placements for border in (low, high)}
        cuts = sorted({0, bucket.numel_unpadded, *borders, *range(shard, bucket.numel_unpadded, shard)})
        for tensor in range(TENSOR):
            prefix = f"optimizer.distributed.dp_group_idx_{tensor + TENSOR * pipeline}.gbuf_idx_{stage}.dtype_{dtypes}"
            for state in ("param", "exp_avg", "exp_avg_sq"):
                for low, high in zip(cuts, cuts[1:], strict=False):
                    rank = tensor + TENSOR * (low // shard + DATA * pipeline)
                    key = f"{prefix}.bucket_idx_0.{state}"
                    writer.chunk(key, (bucket.numel_unpadded,), torch.float32, (low,), (high - low,), rank)
    for group in range(TENSOR * PIPELINE):
        prefix = f"optimizer.distributed.dp_group_idx_{group}"
        tensor, pipeline = group % TENSOR, group // TENSOR
        rank = tensor + TENSOR * DATA * pipeline
        writer.object(f"{prefix}.per_bucket_numel_unpadded/shard_0_1", numels[pipeline], rank)
        groups = [{"lr": 1e-4, "step": 4, "wd_mult": 1.0}]
        writer.object(f"{prefix}.optimizer/shard_0_1", {"param_groups": groups}, rank)
    writer.finish(_common())
    return sum(len(entry.chunks) for entry in writer.entries.values() if isinstance(entry, dcp.TensorStorageMetadata))


def _add_weights(writer: _Writer, pipeline: int, tensor: int, named: list[Any]) -> None:
    for key, shape, cut, layer in named:
        whole = shape if layer is None else (LAYERS, *shape)
        if cut is None and tensor:
            continue
        halves = 2 if "linear_fc1.weight" in key else 1
        sizes = [size // TENSOR // halves if axis == cut else size for axis, size in enumerate(shape)]
        for half in range(halves):
            offsets = [(tensor + TENSOR * half) * sizes[axis] if axis == cut else 0 for axis in range(len(shape))]
            begin = [] if layer is None else [layer]
            one = [] if layer is None else [1]
            rank = tensor + TENSOR * DATA * pipeline
            writer.chunk(key, whole, torch.bfloat16, [*begin, *offsets], [*one, *sizes], rank)


def _common() -> dict[str, Any]:
    arguments = SimpleNamespace(
        tensor_model_parallel_size=TENSOR, pipeline_model_parallel_size=PIPELINE, context_parallel_size=1,
        virtual_pipeline_model_parallel_size=VIRTUAL, data_parallel_size=DATA, world_size=TENSOR * PIPELINE * DATA,
        expert_model_parallel_size=1, expert_tensor_parallel_size=TENSOR, num_layers=LAYERS, hidden_size=HIDDEN,
        num_attention_heads=HEADS, ffn_hidden_size=FEED_FORWARD, padded_vocab_size=VOCABULARY, bf16=True,
        untie_embeddings_and_output_weights=True, swiglu=True, transformer_impl="transformer_engine",
        use_distributed_optimizer=True,
        accumulate_allreduce_grads_in_fp32=True, linear_attention_freq=None,
        dist_ckpt_strictness="assume_ok_unexpected", iteration=1000,
    )  # fmt: skip
    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable", "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }  # fmt: skip
    return {"args": arguments, "iteration": 1000, "checkpoint_version": 3.0, "content_metadata": metadata}


def peak_of(command: list[str]) -> int:
    """Return the peak memory of a process, in bytes.

    It is started by a small process, because on Linux a process starts with the peak memory of its parent
    (`begin_new_exec` in fs/exec.c), and this one has made the checkpoint.
    """
    code = "import resource as r, subprocess as s, sys; s.run(sys.argv[1:], check=True, stdout=s.DEVNULL); " + (
        "print(r.getrusage(r.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code, *command], check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout) * 1024


def main() -> int:
    """Measure; the exit status is 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="make the checkpoint there, and leave it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)) / "iter_0001000"
        chunks = make_checkpoint(folder)
        size = sum(path.stat().st_size for path in folder.iterdir())
        metadata = (folder / ".metadata").stat().st_size
        print(f"{chunks:,} chunks, {size / 1e12:.2f} TB, .metadata {metadata / 1e6:.0f} MB")
        seconds = []
        for _ in range(options.rounds):
            begun = time.monotonic()
            command = [sys.executable, "-m", "mcore_ckpt_ext", "inspect", str(folder)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.monotonic() - begun)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        peak = peak_of(command) / 2**20
    median, work = statistics.median(seconds), (used.ru_utime + used.ru_stime) / options.rounds
    print(
        f"inspect: {median:.2f} s (median of {options.rounds}, goal {GOAL_SECONDS} s), {work:.2f} s of processor time"
    )
    print(f"peak memory {peak:.0f} MiB (goal {GOAL_MEBIBYTES} MiB)")
    return 0 if median <= GOAL_SECONDS and peak <= GOAL_MEBIBYTES else 1


if __name__ == "__main__":
    raise SystemExit(main())
