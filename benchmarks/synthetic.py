"""Makes a realistic checkpoint without Megatron: `dp_reshardable`, by default Llama-like, TP1 x PP4 x DP2.

Masters and moments are noise that depends on name and element, weights are rounded masters, so the master check passes.

    python benchmarks/synthetic.py FOLDER --layers 12 --hidden 1536
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import re
import zlib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import deepseek
import torch
from command_line import parser_of
from memory import bytes_of
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from mcore_ckpt_ext.formats.distcp_files import Array, Chunk, DistcpFiles
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.grad_buffer import PackingRule
from mcore_ckpt_ext.layout.local_model import LocalModels, ModelRank, StoredWeight
from mcore_ckpt_ext.layout.packing_proposals import PackedBuffer, buffer_ranks, pack_buffers
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.parameter_order import LOCAL
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ, FP32_PARAM, WEIGHT, LogicalTensor
from mcore_ckpt_ext.planning.plan import TargetSlice
from mcore_ckpt_ext.planning.write_plan import Block, OutputFile, Record
from mcore_ckpt_ext.storage.folder import Folder
from mcore_ckpt_ext.writing import RecordWriter, lay_out

_DTYPES = (torch.bfloat16, torch.float32)
_STATES = {"param": FP32_PARAM, "exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}
_NOISE = 1 << 22
_STAGES = 4
_GROUP = {
    "wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "step": 1000, "lr": 1e-3, "max_lr": 1e-3, "min_lr": 1e-4,
    "weight_decay": 0.1, "eps": 1e-8, "betas": (0.9, 0.95), "bias_correction": True,
}  # fmt: skip
_SCHEDULER = {
    "max_lr": 1e-3, "lr_warmup_steps": 0, "num_steps": 8000, "lr_decay_style": "cosine", "lr_decay_steps": 80_000,
    "min_lr": 1e-4, "start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "wd_incr_steps": 80_000,
}  # fmt: skip


# The axis that tensor-parallel ranks share, and the number of a rank's pieces: gate and up projection are two.
_CUTS = {
    "embedding.word_embeddings.weight": (0, 1), "output_layer.weight": (0, 1), "linear_qkv.weight": (0, 1),
    "linear_proj.weight": (1, 1), "linear_fc1.weight": (0, 2), "linear_fc2.weight": (1, 1),
}  # fmt: skip


def llama_shapes(
    layers: int, hidden: int, feed_forward: int, vocabulary: int, query_rows: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama-like model by model-space name; `query_rows` is the sum of q, k and v."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (vocabulary, hidden)}
    for layer in range(layers):
        shapes |= {
            f"decoder.layers.{layer}.{name}": shape
            for name, shape in {
                "self_attention.linear_qkv.layer_norm_weight": (hidden,),
                "self_attention.linear_proj.weight": (hidden, hidden),
                "self_attention.linear_qkv.weight": (query_rows, hidden),
                "mlp.linear_fc1.layer_norm_weight": (hidden,),
                "mlp.linear_fc1.weight": (2 * feed_forward, hidden),
                "mlp.linear_fc2.weight": (hidden, feed_forward),
            }.items()
        }
    return shapes | {"decoder.final_layernorm.weight": (hidden,), "output_layer.weight": (vocabulary, hidden)}


def arguments_of(layers: int, hidden: int, feed_forward: int, vocabulary: int, **more: int) -> dict[str, Any]:
    """Return Megatron's arguments for a model of these sizes."""
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "data_parallel_size": 1} | more
    world = sizes["tensor_model_parallel_size"] * sizes["pipeline_model_parallel_size"] * sizes["data_parallel_size"]
    return {
        "num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": feed_forward, "num_attention_heads": 16,
        "padded_vocab_size": vocabulary, "swiglu": True, "bf16": True, "transformer_impl": "local",
        "untie_embeddings_and_output_weights": True, "accumulate_allreduce_grads_in_fp32": True,
        "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False,
        "norm_epsilon": 1e-5, "max_position_embeddings": 4096, "rotary_base": 10000, "group_query_attention": False,
        "use_distributed_optimizer": True, "dist_ckpt_strictness": "assume_ok_unexpected",
        "expert_tensor_parallel_size": sizes["tensor_model_parallel_size"], "world_size": world, **sizes,
    }  # fmt: skip


def local_models(shapes: dict[str, tuple[int, ...]], arguments: dict[str, Any]) -> LocalModels:
    """Return a job's ranks, and the parameters of each."""
    tensor = arguments["tensor_model_parallel_size"]
    weights = {
        name: StoredWeight(LogicalTensor(name, shape, "bfloat16"), _grid(name, shape, tensor))
        for name, shape in shapes.items()
    }
    job = JobArguments.of(arguments)
    return LocalModels(weights, job, ParallelLayout.from_arguments(job), has_expert_optimizer=bool(job.num_experts))


def _grid(name: str, shape: tuple[int, ...], tensor: int) -> tuple[tuple[int, ...], ...]:
    """Return the offsets of the stored chunks of a weight on each axis."""
    grid: list[tuple[int, ...]] = [(0,) for _ in shape]
    axis, pieces = next((cut for ending, cut in _CUTS.items() if name.endswith(ending)), (0, 0))
    if tensor * pieces > 1:
        grid[axis] = tuple(range(0, shape[axis], shape[axis] // (tensor * pieces)))
    return tuple(grid)


def make(folder: Path, *, layers: int, hidden: int, feed_forward: int, vocabulary: int, file_bytes: int) -> int:
    """Write the run folder, and return its size in bytes."""
    arguments = arguments_of(
        layers, hidden, feed_forward, vocabulary, pipeline_model_parallel_size=_STAGES, data_parallel_size=2
    )
    iteration, records = make_empty(folder, arguments, file_bytes)
    with Folder.at(iteration) as content:
        writer = RecordWriter(content, _noise_filler(), workers=2)
        writer.write(list(enumerate(records)), lambda number, crc: None, lambda count: None)
    return bytes_of(folder)


def make_empty(
    folder: Path, arguments: dict[str, Any], file_bytes: int, plans: bool = False
) -> tuple[Path, list[Record]]:
    """Write a run folder whose tensors are holes, which read as zeros and take no space.

    `plans`: whether the index contains the plans of all ranks, as Megatron writes them.
    """
    files, records, metadata = describe(arguments, file_bytes)
    if plans:
        metadata = _with_plans(metadata, arguments["world_size"])
    iteration = folder / "iter_0001000"
    iteration.mkdir(parents=True)
    with Folder.at(iteration) as opened:
        lay_out(files, opened)
    config = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}).encode()
    small = [(iteration / ".metadata", metadata), (iteration / "metadata.json", config)]
    for path, content in [*small, (folder / "latest_checkpointed_iteration.txt", b"1000")]:
        path.write_bytes(content)
    return iteration, records


def _with_plans(metadata: bytes, ranks: int) -> bytes:
    """Add each rank's plan to the index (`all_local_plans`, torch.py of Megatron's strategies)."""
    found = pickle.loads(metadata)  # trusted: made by this program
    items = []
    for key, entry in found.state_dict_metadata.items():
        for number, chunk in enumerate(getattr(entry, "chunks", ())):
            place = ChunkStorageMetadata(torch.Size([*chunk.offsets]), torch.Size([*chunk.sizes]))
            data = TensorWriteData(place, entry.properties, entry.size)
            index = MetadataIndex(key, torch.Size([*chunk.offsets]), number)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    found.all_local_plans = [SavePlan(items[rank::ranks]) for rank in range(ranks)]
    return pickle.dumps(found)


def describe(arguments: dict[str, Any], file_bytes: int) -> tuple[list[OutputFile], list[Record], bytes]:
    """Return the files of a checkpoint, its records and its `.metadata`."""
    models = local_models(shapes_of(arguments), arguments)
    writer = DistcpFiles(file_bytes)
    writer.add_object(
        "common_state/shard_0_1",
        {
            "args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 1000,
            "optimizer": {"param_state_sharding_type": "dp_reshardable"},
            "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"},
            "opt_param_scheduler": _SCHEDULER,
        },
    )  # fmt: skip
    for array in _weights(models):
        writer.add_array(array)
    for number in range(models.layout.world if arguments.get("num_experts") else 0):  # with experts, of every rank
        writer.add_object(f"rng_state/shard_0.0.{number}_1.1.{models.layout.world}", {"seed": number})
    for prefix, rank in _groups(models):
        group = _GROUP | {"is_expert_parallel": rank.expert is not None}
        groups = [group, group | {"wd_mult": 0.0, "weight_decay": 0.0}]
        writer.add_object(f"{prefix}optimizer/shard_0_1", {"param_groups": groups})
        sizes = []
        for array, numel in _buckets(models, rank, prefix):
            writer.add_array(array)
            if array.key.endswith(".param"):
                sizes.append(numel)
        writer.add_object(f"{prefix}per_bucket_numel_unpadded/shard_0_1", [{_DTYPES: sizes}])
    return writer.finish(with_shapes=False)


def _groups(models: LocalModels) -> Iterator[tuple[str, ModelRank]]:
    """Yield every optimizer of a model rank: the prefix of its keys, and the rank."""
    layout, middle = models.layout, "optimizer.distributed.dp_group_idx_"
    dense = "chained_0." if models.has_expert_optimizer else ""
    for number, (stage, tensor) in enumerate(product(range(layout.pipeline), range(layout.tensor))):
        yield f"{dense}{middle}{number}.", ModelRank(stage, tensor)
    for number, (stage, expert) in enumerate(product(range(layout.pipeline), range(layout.expert))):
        if models.has_expert_optimizer and any(models.names(ModelRank(stage, 0, expert)) or []):
            yield f"chained_1.{middle}{number}.", ModelRank(stage, 0, expert)


def shapes_of(arguments: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model that arguments describe."""
    hidden, heads = arguments["hidden_size"], arguments["num_attention_heads"]
    groups = arguments.get("num_query_groups", heads)
    query_rows = hidden + 2 * groups * hidden // heads
    vocabulary = arguments["padded_vocab_size"]
    if arguments.get("num_experts"):
        return deepseek.shapes_of(arguments)
    return llama_shapes(arguments["num_layers"], hidden, arguments["ffn_hidden_size"], vocabulary, query_rows)


def _weights(models: LocalModels) -> Iterator[Array]:
    """Yield the arrays of all weights; those of a layer's experts are stacked, as in Megatron."""
    stacks: dict[str, list[tuple[str, StoredWeight]]] = {}
    for name, weight in models.weights.items():
        stacks.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), []).append((name, weight))
    for key, stack in stacks.items():
        first, chunks = stack[0][1], []
        is_stacked = key != stack[0][0]
        for number, (name, weight) in enumerate(stack):
            above = (number,) if is_stacked else ()
            sizes = tuple(size // len(axis) for size, axis in zip(weight.tensor.shape, weight.grid, strict=True))
            for offsets in product(*weight.grid):
                part = Slice.whole((Region(name, offsets, sizes),))
                wanted = TargetSlice(WEIGHT, part, {name: weight.tensor})
                chunks.append(Chunk((*above, *offsets), ((1,) if is_stacked else ()) + sizes, wanted))
        shape = ((len(stack),) if is_stacked else ()) + first.tensor.shape
        yield Array(key, shape, "bfloat16", tuple(chunks))


def buffer_of(models: LocalModels, rank: ModelRank) -> PackedBuffer:
    """Return the gradient buffer of one rank."""
    (buffer,) = pack_buffers(models, LOCAL, PackingRule.SINCE_0_13, rank, [0]) or []
    return buffer


def wanted_by(models: LocalModels, rank: ModelRank, share: int) -> list[TargetSlice]:
    """Return the slices of one data-parallel rank, `share`, in the single bucket of a model rank's buffer."""
    buffer = buffer_of(models, rank)
    (bucket,) = buffer.buckets
    size = (bucket.stop - bucket.start) // buffer_ranks(models, rank)
    found = []
    for index, start, stop in bucket.placements:
        low, high = max(start, share * size), min(stop, (share + 1) * size)
        if low < high:
            name = buffer.names[index]
            tensors = {name: LogicalTensor(name, models.weights[name].tensor.shape, "float32")}
            part = Slice(buffer.regions[index], low - start, high - start)
            found += [TargetSlice(kind, part, tensors) for kind in _STATES.values()]
    return found


def weights_of(models: LocalModels, rank: ModelRank) -> list[TargetSlice]:
    """Return the weights of one model rank."""
    return [
        TargetSlice(WEIGHT, Slice.whole(regions), {name: models.weights[name].tensor})
        for name, regions in models.candidates(rank)
    ]


def _buckets(models: LocalModels, rank: ModelRank, prefix: str) -> Iterator[tuple[Array, int]]:
    """Yield the arrays of one model-parallel rank, with a chunk for each parameter and data-parallel rank."""
    buffer = buffer_of(models, rank)
    for number, bucket in enumerate(buffer.buckets):
        share = (bucket.stop - bucket.start) // buffer_ranks(models, rank)
        for state, kind in _STATES.items():
            chunks = []
            for index, start, stop in sorted(bucket.placements, key=lambda placed: placed[1]):
                name = buffer.names[index]
                borders = sorted({start, stop, *(b for b in range(share, bucket.stop, share) if start < b < stop)})
                for low, high in zip(borders, borders[1:], strict=False):
                    part = Slice(buffer.regions[index], low - start, high - start)
                    tensor = LogicalTensor(name, models.weights[name].tensor.shape, "float32")
                    chunks.append(Chunk((low,), (high - low,), TargetSlice(kind, part, {name: tensor})))
            key = f"{prefix}gbuf_idx_0.dtype_{buffer.dtypes}.bucket_idx_{number}.{state}"
            yield Array(key, (bucket.numel_unpadded,), "float32", tuple(chunks)), bucket.numel_unpadded


def _noise_filler() -> Any:
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(1))

    def fill(record: Record, block: Block, elements: torch.Tensor) -> None:
        for placed in block.content:
            wanted = placed.wanted
            kind = FP32_PARAM if wanted.kind == WEIGHT else wanted.kind
            region = wanted.slice.regions[0]
            before = region.offsets[0] * math.prod(region.sizes[1:])  # with TP1 a part consists of whole rows
            at = zlib.crc32(f"{kind} {region.name}".encode()) % _NOISE + before + wanted.slice.start
            room = elements[placed.start : placed.stop]
            done = 0
            while done < room.numel():
                first = (at + done) % _NOISE
                count = min(_NOISE - first, room.numel() - done)
                room[done : done + count] = noise[first : first + count]
                done += count
            if wanted.kind == EXP_AVG_SQ:
                room.abs_()

    return fill


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__, layers=12, hidden=1536, feed_forward=4096, vocabulary=32000)
    options = vars(parser.parse_args())
    if options["layers"] % _STAGES:
        parser.error(f"--layers has to be a multiple of {_STAGES}, the number of pipeline stages")
    print(f"{make(options.pop('folder'), **options, file_bytes=1 << 29):,} bytes")


if __name__ == "__main__":
    main()
