"""Planning the resume of one rank of a very large job: open, plan and agree, seconds and memory.

    python benchmarks/planning.py FOLDER [--model llama deepseek] [--ranks 8192 16384] [--runs 5]

    llama       Llama 405B from TP8 x PP16 as TP4 x PP32, and half of its layers
    deepseek    DeepSeek-V3 671B, 61 layers of 256 experts, from PP16 x EP64 as PP8 x EP64

The checkpoints below FOLDER have all metadata, the plans of the ranks included, and holes for tensors. One rank's work,
in a process of its own: open the checkpoint, recover the layout as far as the rank needs it, plan weights and
optimizer, look up every record that the plan reads, and compare the names that all ranks tell; the same calls as in a
live job (`optimizer_reshard.prepare` and `online.sharded_load`), the live rank's shards worked out from the arguments.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepseek
import synthetic

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.layout.local_model import LocalModels, ModelRank
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.online.admission import check_names, spelling_in
from mcore_ckpt_ext.online.live_job import RankView
from mcore_ckpt_ext.planning.plan import WantedSlice, make_plan

GOAL_SECONDS, GOAL_BYTES = 5.0, 2 << 30
LLAMA = {
    "hidden": 16384, "feed_forward": 53248, "vocabulary": 128256, "num_attention_heads": 128, "num_query_groups": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A job: the arguments that wrote, those that resume, and the rank that is looked at, in the middle of all."""

    written: dict[str, Any]
    running: dict[str, Any]
    ranks: tuple[tuple[ModelRank, int], ...]


def llama(layers: int, ranks: int) -> Case:
    """With embedding and loss counted as a layer each, as that model was trained: 62 and 126 divide by the stages."""
    written, running = (
        synthetic.arguments_of(
            layers, **LLAMA, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
            data_parallel_size=ranks // tensor // pipeline, account_for_embedding_in_pipeline_split=True,
            account_for_loss_in_pipeline_split=True,
        )
        for tensor, pipeline in ((8, 16), (4, 32))
    )  # fmt: skip
    return Case(written, running, ((ModelRank(pipeline=13, tensor=1), 17),))


def deepseek_v3(ranks: int) -> Case:
    """Experts have an optimizer of their own."""
    written, running = (deepseek.arguments_for(pipeline, 64, ranks) for pipeline in (16, 8))
    dense, experts = ModelRank(pipeline=3, tensor=0), ModelRank(pipeline=3, tensor=0, expert=17)
    return Case(written, running, ((dense, 17), (experts, 1)))


CASES = {"llama 62": lambda ranks: llama(62, ranks), "llama 126": lambda ranks: llama(126, ranks),
         "deepseek": deepseek_v3}  # fmt: skip


def views_of(models: LocalModels, ranks: int) -> list[RankView]:
    """What every rank tells: its names where it is the first of its replicas, otherwise nothing."""
    layout, kinds = models.layout, frozenset({"DistributedOptimizer"})
    experts: list[int | None] = list(range(layout.expert)) if models.experts_apart else [None]
    places = [(stage, expert) for stage in range(layout.pipeline) for _ in range(layout.tensor) for expert in experts]
    names = {place: _names(models, *place) for place in places}
    told = [RankView(names[place], names[place], [names[place]], kinds) for place in places]
    return told + [RankView([], [], [], kinds)] * (ranks - len(told))


def _names(models: LocalModels, stage: int, expert: int | None) -> list[str]:
    held = [models.names(ModelRank(stage, 0, part)) or [] for part in dict.fromkeys((None, expert))]
    return [name for chunks in held for chunk in chunks for name in chunk]


def resident(name: str) -> int:
    """Bytes, of what Linux says about this process's memory; getrusage also tells of the one that started it."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def plan_once(folder: Path, case: Case) -> dict[str, float]:
    """Plan, and say how long it took."""
    models = synthetic.local_models(synthetic.shapes_of(case.running), case.running)
    wanted: list[WantedSlice] = []
    for rank, share in case.ranks:
        wanted += synthetic.wanted_by(models, rank, share) + synthetic.weights_of(models, rank)
    views = views_of(models, case.running["world_size"])
    sent = sum(len(data) for data in {pickle.dumps(view) for view in views})
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Linux starts the peak anew; before, it was that of the imports
    begun, busy = time.monotonic(), time.process_time()
    checkpoint = open_checkpoint(folder)
    names = {name for view in views for name in view.names}
    if spelling_in(checkpoint, names) is str:
        check_names(checkpoint, names)
    agreed, opened = time.monotonic() - begun, time.process_time() - busy
    plan = make_plan(wanted, checkpoint)
    for copy in plan.copies:
        checkpoint.transfer.locate(copy.extent)
    seconds, busy = time.monotonic() - begun, time.process_time() - busy
    memory = resident("VmHWM")
    own = sum(want.slice.numel * (2 if want.kind == WEIGHT else 4) for want in wanted)
    assert plan.bytes_read == own  # noqa: S101 - a wrong plan has no speed
    return {
        "seconds": seconds, "processor": busy, "opening": opened, "agreed": agreed, "memory": memory, "before": before,
        "names": len(names), "bytes": plan.bytes_read, "copies": len(plan.copies), "sent": sent,
        "asked": checkpoint.reader.bytes_read,
    }  # fmt: skip


def folder_of(folder: Path, name: str, ranks: int) -> Path:
    """Where the checkpoint of a case lies."""
    return folder / f"{name}_{ranks}".replace(" ", "_")


def main() -> None:
    """Make the checkpoints, and measure in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", nargs="+", choices=["llama", "deepseek"], default=["llama", "deepseek"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(plan_once(options.folder, CASES[options.once](options.ranks[0]))))
        return
    cases = [(name, ranks) for ranks in options.ranks for name in CASES if name.split()[0] in options.model]
    for name, ranks in cases:
        folder = folder_of(options.folder, name, ranks)
        if not folder.exists():
            synthetic.make_empty(folder, CASES[name](ranks).written, 1 << 36, plans=True)
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for name, ranks in cases * options.runs:
        folder = folder_of(options.folder, name, ranks)
        command = [sys.executable, __file__, str(folder), "--once", name, "--ranks", str(ranks)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        found.setdefault((name, ranks), []).append(json.loads(result.stdout))
    print(f"goals: {GOAL_SECONDS} s, {GOAL_BYTES >> 20} MiB")
    for (name, ranks), runs in found.items():
        index = (folder_of(options.folder, name, ranks) / "iter_0001000" / ".metadata").stat().st_size
        keys = ("seconds", "processor", "opening")
        seconds, busy, opening = (statistics.median(run[key] for run in runs) for key in keys)
        memory, last = max(run["memory"] for run in runs), runs[-1]
        job = (index + ranks * (last["asked"] + last["bytes"])) / 1e12
        print(
            f"| {name}, {ranks} ranks | {seconds:.2f} s, {busy:.2f} of the processor ({opening:.2f} to open and agree) "
            f"| {memory / 2**20:.0f} MiB, {last['before'] / 2**20:.0f} of it before "
            f"| index {index / 1e6:.1f} MB; {last['bytes'] / 1e6:.0f} MB in "
            f"{last['copies']} copies, {last['asked'] / 1e6:.2f} MB to plan it; the job: {job:.2f} TB; "
            f"names told: {last['sent'] / 1e6:.1f} MB |"
        )


if __name__ == "__main__":
    main()
