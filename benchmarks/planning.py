"""Measures planning the resume of one rank of a very large job, with the index received from the first rank.

    python benchmarks/planning.py FOLDER [--model llama deepseek] [--ranks 8192 16384] [--runs 5]

    llama       Llama 405B from TP8 x PP16 as TP4 x PP32, and half of its layers
    deepseek    DeepSeek-V3 671B, 61 layers of 256 experts, from PP16 x EP64 as PP8 x EP64

The checkpoints in FOLDER have all metadata, including the plans of the ranks, and holes for tensors. A first rank reads
and parses the index, checks that all files exist, and sends the index; meanwhile the others wait. One of the others, in
a separate process, receives it, lets real Megatron read the common state, opens the checkpoint, recovers the layout as
far as needed, plans weights and optimizer, looks up every record that the plan reads, and compares the names that all
ranks report. These are the calls of a live job (`probe.probe_checkpoint`, `load_assessment`,
`optimizer_reshard.prepare`, `live.sharded_load`), with the live rank's shards derived from the arguments. Seconds are
the sum of both; sending some ten megabytes between them is not measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import deepseek
import synthetic
from command_line import parser_of
from megatron.core import dist_checkpointing

from mcore_ckpt_ext.collectives import agree_here
from mcore_ckpt_ext.formats.checkpoint import Checkpoint, open_checkpoint
from mcore_ckpt_ext.layout.local_model import LocalModels, ModelRank
from mcore_ckpt_ext.megatron.live.compatibility import check_names, name_map_for
from mcore_ckpt_ext.megatron.live.job import RankSummary
from mcore_ckpt_ext.megatron.probe import probe_checkpoint
from mcore_ckpt_ext.megatron.shared_index import share_index
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.planning.plan import Plan, TargetSlice, make_plan
from mcore_ckpt_ext.storage.dcp_index import FolderIndex

GOAL_SECONDS, GOAL_BYTES = 5.0, 2 << 30
LLAMA = {
    "hidden": 16384, "feed_forward": 53248, "vocabulary": 128256, "num_attention_heads": 128, "num_query_groups": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A job: the arguments that wrote, those that resume, and the measured rank, in the middle of all."""

    written: dict[str, Any]
    running: dict[str, Any]
    ranks: tuple[tuple[ModelRank, int], ...]


def llama(layers: int, ranks: int) -> Case:
    """Return Llama's case; embedding and loss count as layers, as in its training, so that stages divide 62 and 126."""
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
    """Return DeepSeek-V3's case; experts have an optimizer of their own."""
    written, running = (deepseek.arguments_for(pipeline, 64, ranks) for pipeline in (16, 8))
    dense, experts = ModelRank(pipeline=3, tensor=0), ModelRank(pipeline=3, tensor=0, expert=17)
    return Case(written, running, ((dense, 17), (experts, 1)))


CASES = {"llama 62": lambda ranks: llama(62, ranks), "llama 126": lambda ranks: llama(126, ranks),
         "deepseek": deepseek_v3}  # fmt: skip


def views_of(models: LocalModels, ranks: int) -> list[RankSummary]:
    """Return the summaries of all ranks: names on the first of several replicas, empty on others."""
    layout, kinds = models.layout, frozenset({"DistributedOptimizer"})
    experts: list[int | None] = list(range(layout.expert)) if models.has_expert_optimizer else [None]
    places = [(stage, expert) for stage in range(layout.pipeline) for _ in range(layout.tensor) for expert in experts]
    names = {place: _names(models, *place) for place in places}
    told = [RankSummary(names[place], names[place], [names[place]], kinds) for place in places]
    return told + [RankSummary([], [], [], kinds)] * (ranks - len(told))


def _names(models: LocalModels, stage: int, expert: int | None) -> list[str]:
    held = [models.names(ModelRank(stage, 0, part)) or [] for part in dict.fromkeys((None, expert))]
    return [name for chunks in held for chunk in chunks for name in chunk]


def resident(name: str) -> int:
    """Return a field of this process's memory in bytes, as reported by Linux; getrusage may include the parent's."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def hand_over(run: Path, way: Connection) -> None:
    """Do the first rank's work before the others': read the index, check that all files exist, and send it."""
    begun, busy = time.monotonic(), time.process_time()
    arguments = argparse.Namespace(load=str(run), ckpt_step=None)
    probe = agree_here("looking", lambda: probe_checkpoint(arguments, "load", str(run), shares_index=True))
    data = pickle.dumps(probe.index)  # the first rank goes on with the rest, which is not freed
    way.send((time.monotonic() - begun, time.process_time() - busy, resident("VmHWM")))
    way.send_bytes(data)


def handed_over(run: Path) -> tuple[float, float, int, bytes]:
    """Return the first rank's seconds, by the clock and of the processor, its memory, and the bytes that it sends."""
    spawn = multiprocessing.get_context("spawn")  # a separate process, which shares no memory
    way, far = spawn.Pipe()
    first = spawn.Process(target=hand_over, args=(run, far))
    first.start()
    far.close()  # otherwise the end of the other process would not be noticed
    seconds, busy, memory = way.recv()
    data = way.recv_bytes()
    first.join()
    return seconds, busy, memory, data


def plan_once(folder: Path, case: Case) -> dict[str, float]:
    """Plan, and return the durations."""
    iteration = folder / "iter_0001000"
    first, first_busy, first_memory, data = handed_over(folder)
    models = synthetic.local_models(synthetic.shapes_of(case.running), case.running)
    wanted: list[TargetSlice] = []
    for rank, share in case.ranks:
        wanted += synthetic.wanted_by(models, rank, share) + synthetic.weights_of(models, rank)
    views = views_of(models, case.running["world_size"])
    sent = sum(len(data) for data in {pickle.dumps(view) for view in views})
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, which was that of the imports

    def opened() -> Checkpoint:
        checkpoint = open_checkpoint(folder, index=stored)
        names = {name for view in views for name in view.names}
        if name_map_for(checkpoint, names) is str:
            check_names(checkpoint, names)
        return checkpoint

    def planned() -> Plan:
        plan = make_plan(wanted, checkpoint)
        for read in plan.reads:
            checkpoint.files.transfer.locate(read.extent)
        return plan

    begun, busy = time.monotonic(), time.process_time()
    handed = pickle.loads(data)  # pickled by the process above
    assert handed is not None  # noqa: S101 - otherwise another way was measured
    stored = FolderIndex(iteration, handed)
    with share_index(stored):
        agree_here("looking at the checkpoint", lambda: dist_checkpointing.load_common_state_dict(str(iteration)))
        seen = time.process_time() - busy
        checkpoint = agree_here("opening the checkpoint", opened)
        opening = time.process_time() - busy
        plan = agree_here("planning the resume", planned)
    seconds, busy = time.monotonic() - begun, time.process_time() - busy
    memory = resident("VmHWM")
    own = sum(want.slice.numel * (2 if want.kind == WEIGHT else 4) for want in wanted)
    assert plan.bytes_read == own  # noqa: S101 - the duration of a wrong plan is meaningless
    return {
        "first": first, "first_busy": first_busy, "first_memory": first_memory, "handed": len(data), "seen": seen,
        "seconds": seconds, "processor": busy, "opening": opening, "memory": memory, "before": before,
        "bytes": plan.bytes_read, "copies": len(plan.reads), "sent": sent,
        "asked": checkpoint.files.reader.bytes_read,
    }  # fmt: skip


def parsed_cases(description: str | None) -> argparse.Namespace:
    """Return the command line of a benchmark of these cases; `once` is for the process that measures one."""
    parser = parser_of(description, runs=5)
    parser.add_argument("--model", nargs="+", choices=["llama", "deepseek"], default=["llama", "deepseek"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--once", help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen_cases(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the cases of a command line, with their numbers of ranks."""
    return [(name, ranks) for ranks in options.ranks for name in CASES if name.split()[0] in options.model]


def made_folder(folder: Path, name: str, ranks: int) -> Path:
    """Return the folder of a case's checkpoint, which is made if it is not there."""
    made = folder / f"{name}_{ranks}".replace(" ", "_")
    if not made.exists():
        synthetic.make_empty(made, CASES[name](ranks).written, 1 << 28, plans=True)
    return made


def main() -> None:
    """Make the checkpoints, and measure in turn."""
    options = parsed_cases(__doc__)
    if options.once:
        print(json.dumps(plan_once(options.folder, CASES[options.once](options.ranks[0]))))
        return
    cases = chosen_cases(options)
    folders = {case: made_folder(options.folder, *case) for case in cases}
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for name, ranks in cases * options.runs:
        command = [sys.executable, __file__, str(folders[name, ranks]), "--once", name, "--ranks", str(ranks)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        found.setdefault((name, ranks), []).append(json.loads(result.stdout))
    print(f"goals: {GOAL_SECONDS} s, {GOAL_BYTES >> 20} MiB")
    for (name, ranks), runs in found.items():
        index = (folders[name, ranks] / "iter_0001000" / ".metadata").stat().st_size
        keys = ("first", "first_busy", "seconds", "processor", "seen", "opening")
        first, first_busy, seconds, busy, seen, opening = (statistics.median(run[key] for run in runs) for key in keys)
        memory, last = max(run["memory"] for run in runs), runs[-1]
        first_memory = max(run["first_memory"] for run in runs)
        job = (index + ranks * (last["asked"] + last["bytes"])) / 1e12
        print(
            f"| {name}, {ranks} ranks | {first + seconds:.2f} s, of which {first:.2f} the first rank's "
            f"({first_busy:.2f} of the processor), whose memory {first_memory / 2**20:.0f} MiB; then {busy:.2f} of it "
            f"({seen:.2f} to take the index and see the common state, {opening:.2f} with opening and agreeing) "
            f"| {memory / 2**20:.0f} MiB, {last['before'] / 2**20:.0f} of it before "
            f"| index {index / 1e6:.1f} MB, {last['handed'] / 1e6:.1f} MB handed over; {last['bytes'] / 1e6:.0f} MB in "
            f"{last['copies']} copies, {last['asked'] / 1e6:.2f} MB to plan it; the job: {job:.2f} TB; "
            f"names told: {last['sent'] / 1e6:.1f} MB |"
        )


if __name__ == "__main__":
    main()
