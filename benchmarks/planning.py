"""Planning the resume of one rank: Llama 405B from TP8 x PP16 x DP64 as TP4 x PP32 x DP64, and half of that model.

    python benchmarks/planning.py FOLDER [--runs 5] [--data 64]

With `--data 128` these are 16,384 ranks.

The checkpoints below FOLDER have all metadata, and holes for tensors. One rank's work, in a process of its own: open
the checkpoint, recover the layout as far as the rank needs it, plan, and look up every record that the plan reads; the
same calls as in a live job (`optimizer_reshard.prepare`), the live optimizer's shards worked out from the arguments.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import synthetic

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.layout.local_model import ModelRank
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.planning.plan import WantedSlice, make_plan

GOAL_RATIO, GOAL_BYTES = 2.2, 2 << 30
# With embedding and loss counted as a layer each, as that model was trained: 62 and 126 divide by the stages.
LAYERS = (62, 126)
MODEL = {
    "hidden": 16384, "feed_forward": 53248, "vocabulary": 128256, "num_attention_heads": 128, "num_query_groups": 8,
}  # fmt: skip
WRITTEN, RUNNING = (8, 16), (4, 32)
# A rank in the middle of its pipeline and of its data-parallel group.
RANK, SHARE = ModelRank(pipeline=13, tensor=1), 17


def arguments_for(layers: int, layout: tuple[int, int], data: int) -> dict[str, Any]:
    """Megatron's arguments of a job."""
    tensor, pipeline = layout
    return synthetic.arguments_of(
        layers, **MODEL, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
        data_parallel_size=data, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True,
    )  # fmt: skip


def wanted_by_rank(layers: int, data: int) -> list[WantedSlice]:
    """What the rank's optimizer holds: its share of the one bucket of its buffer."""
    arguments = arguments_for(layers, RUNNING, data)
    models = synthetic.local_models(synthetic.shapes_of(arguments), arguments)
    return synthetic.wanted_by(models, RANK, SHARE)


def plan_once(folder: Path, layers: int, data: int) -> dict[str, float]:
    """Plan, and say how long it took."""
    wanted = wanted_by_rank(layers, data)
    begun = time.monotonic()
    checkpoint = open_checkpoint(folder)
    names = checkpoint.names(WEIGHT)
    plan = make_plan(wanted, checkpoint)
    for copy in plan.copies:
        checkpoint.transfer.locate(copy.extent)
    seconds = time.monotonic() - begun
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert plan.bytes_read == 4 * sum(want.slice.numel for want in wanted)  # noqa: S101 - a wrong plan has no speed
    return {
        "seconds": seconds, "memory": after << 10, "names": len(names), "bytes": plan.bytes_read,
        "copies": len(plan.copies), "asked": checkpoint.reader.bytes_read,
    }  # fmt: skip


def main() -> None:
    """Make the checkpoints, and measure in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--data", type=int, default=64)
    parser.add_argument("--once", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(plan_once(options.folder, options.once, options.data)))
        return
    for layers in LAYERS:
        folder = options.folder / f"{layers}_{options.data}"
        if not folder.exists():
            synthetic.make_empty(folder, arguments_for(layers, WRITTEN, options.data), 1 << 36)
        size = (folder / "iter_0001000" / ".metadata").stat().st_size
        print(f"{layers} layers: .metadata of {size / 1e6:.1f} MB", flush=True)
    found: dict[int, list[dict[str, float]]] = {layers: [] for layers in LAYERS}
    for _ in range(options.runs):
        for layers in LAYERS:
            folder = options.folder / f"{layers}_{options.data}"
            command = [sys.executable, __file__, str(folder), "--once", str(layers), "--data", str(options.data)]
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            found[layers].append(json.loads(result.stdout))
    medians = {layers: statistics.median(run["seconds"] for run in runs) for layers, runs in found.items()}
    for layers, runs in found.items():
        memory, last = max(run["memory"] for run in runs), runs[-1]
        read = f"{last['bytes'] / 1e6:.0f} MB in {last['copies']} copies, {last['asked'] / 1e6:.1f} MB to plan it"
        print(f"| {layers} layers | {medians[layers]:.2f} s | {memory / 2**20:.0f} MiB, all | {read} |")
    print(f"doubling: {medians[LAYERS[1]] / medians[LAYERS[0]]:.2f} x (goal {GOAL_RATIO}; {GOAL_BYTES >> 20} MiB)")


if __name__ == "__main__":
    main()
