"""Measures reading one rank's optimizer shards under another layout, against stock Megatron's load under the old one.

    python benchmarks/reading.py FOLDER [--runs 5] [--layers 12 --hidden 1536]

FOLDER gets a checkpoint of TP1 x PP4 x DP2 (about 6 GB). This package plans and reads the shards of the first tensor
rank of the last stage of TP2 x PP2 x DP2. Stock: `megatron.core.dist_checkpointing.load` (megatron-core from PyPI) of
the shards of a rank of the unchanged layout, which are as many bytes or fewer. Each is run in a separate process, in
turn; the time starts after the imports and includes the allocation of the destinations.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import synthetic
import torch
from command_line import parser_of

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.layout.local_model import ModelRank
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM
from mcore_ckpt_ext.optimizers.flat_buffers import FlatBuffers
from mcore_ckpt_ext.planning.plan import make_plan
from mcore_ckpt_ext.transfer import Transfer

# The stage of the old layout whose shards stock Megatron loads.
STAGE, SHARE = 1, 0


def ours(folder: Path) -> tuple[float, int]:
    """Return seconds and bytes of this package's way."""
    arguments = dict(open_checkpoint(folder).job.args)
    arguments |= {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    models = synthetic.local_models(synthetic.shapes_of(arguments), arguments)
    begun = time.monotonic()
    checkpoint = open_checkpoint(folder)
    wanted = synthetic.wanted_by(models, ModelRank(pipeline=1, tensor=0), SHARE)
    plan = make_plan(wanted, checkpoint)
    destinations = [torch.empty(want.slice.numel) for want in wanted]
    Transfer(checkpoint.files.reader).execute(plan, destinations)
    return time.monotonic() - begun, plan.bytes_read


def stock(folder: Path) -> tuple[float, int]:
    """Return seconds and bytes of the framework's way."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.validation import StrictHandling

    meeting = f"file://{folder}/.rendezvous-{os.getpid()}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    checkpoint = open_checkpoint(folder)
    optimizer = checkpoint.optimizer.state()
    assert isinstance(optimizer, FlatBuffers)  # noqa: S101 - the checkpoint was made here
    ranges = []
    for (bucket, kind), array in optimizer.arrays[0, STAGE].items():
        state = "param" if kind == FP32_PARAM else kind
        key = f"optimizer.distributed.dp_group_idx_{STAGE}.gbuf_idx_{bucket.buffer}.dtype_{bucket.dtypes}"
        share = -(-array.numel // 2)
        ranges += [
            (f"{key}.bucket_idx_{bucket.bucket}.{state}", array.numel, piece.start, piece.stop)
            for piece in array.pieces if piece.stop <= share
        ]  # fmt: skip
    begun = time.monotonic()
    state_dict = {}
    for number, (key, numel, start, stop) in enumerate(ranges):
        data = torch.empty(stop - start)
        state_dict[str(number)] = ShardedTensor(key, data, data.dtype, (stop - start,), (numel,), (start,), None)
    loaded = dist_checkpointing.load(
        state_dict,
        str(checkpoint.files.folder),
        validate_access_integrity=False,
        strict=StrictHandling.ASSUME_OK_UNEXPECTED,
    )
    seconds = time.monotonic() - begun
    return seconds, sum(loaded[str(number)].nbytes for number in range(len(ranges)))


WAYS: dict[str, Callable[[Path], tuple[float, int]]] = {"ours": ours, "stock": stock}


def main() -> None:
    """Make the checkpoint, and measure in turn."""
    parser = parser_of(__doc__, runs=5, layers=12, hidden=1536, feed_forward=4096, vocabulary=32000)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(WAYS[options.way](options.folder)))
        return
    source = options.folder / "source"
    if not source.exists():
        sizes = {name: getattr(options, name) for name in ("layers", "hidden", "feed_forward", "vocabulary")}
        print(f"source: {synthetic.make(source, **sizes, file_bytes=1 << 29) / 1e9:.2f} GB", flush=True)
    found: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
    for _ in range(options.runs):
        for way, runs in found.items():
            command = [sys.executable, __file__, str(source), "--way", way]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs.append(json.loads(result.stdout.splitlines()[-1]))
    rates = {way: statistics.median(size / seconds for seconds, size in runs) for way, runs in found.items()}
    for way, runs in found.items():
        seconds = statistics.median(seconds for seconds, _ in runs)
        print(f"| {way} | {runs[0][1] / 1e6:.0f} MB | {seconds:.2f} s | {rates[way] / 1e6:.0f} MB/s |")
    print(f"{rates['ours'] / rates['stock']:.1f} x (goal: at least 3)")


if __name__ == "__main__":
    main()
