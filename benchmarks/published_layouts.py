"""Compares plans with published training setups: are they listed, do they fit, how well do they rank, how much memory?

    python benchmarks/published_layouts.py layouts.json

Each model is made as metadata alone. A setup counts as published with its layout, batch, precision, recomputation and
optimizer; the search itself knows the model and the number of GPUs, not the layout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from published_models import Row, arguments_of, low_rank_of, shapes_of

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.local_parameters import newest_cuts
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.parameter_parts import parts_of
from mcore_ckpt_ext.layout_choice.found_layout import FoundLayout, SearchRequest
from mcore_ckpt_ext.layout_choice.memory import Memory
from mcore_ckpt_ext.layout_choice.model_table import (
    ModelTable,
    Parameter,
    embedding_copies,
    place_after_layers,
)
from mcore_ckpt_ext.layout_choice.padded_rows import PaddedRows
from mcore_ckpt_ext.layout_choice.search import join_virtual_stages, search
from mcore_ckpt_ext.layout_choice.stage_activations import recomputation_of
from mcore_ckpt_ext.model_space.anatomy import BLOCKS, is_in_vocabulary
from mcore_ckpt_ext.model_space.names import parse, split_layer
from mcore_ckpt_ext.operations.job_buffers import buffers_of
from mcore_ckpt_ext.operations.parameter_table import state_bytes
from mcore_ckpt_ext.versions import Version

GIB = 1 << 30
RELEASE = Version(0, 19)
# Measured figures by their names in the facts: the unit, and what they hold.
ALLOCATED, RESERVED, DEVICE = "what torch has allocated", "what torch has reserved", "what the device shows"
FIGURES = {
    "peak_alloc_gib": (GIB, ALLOCATED), "peak_alloc_gb": (10**9, ALLOCATED),
    "peak_reserved_gib": (GIB, RESERVED), "per_gpu_gib_approx": (GIB, RESERVED),
    "peak_gb": (10**9, DEVICE), "peak_device_gb": (10**9, DEVICE),
}  # fmt: skip
FIRST = 10


@dataclass(frozen=True)
class Result:
    """What a plan says about a row.

    Attributes:
        rank: the line of a plan for that number of GPUs that names it; None if none does.
        memory: the estimate under the published layout; None if it is excluded.
        measured: bytes; None if no figure is published.
        kind: what that figure holds.
        states: bytes after a step, nothing running; None if not published.
    """

    row: Row
    reason: str
    memory: Memory | None
    rank: int | None
    listed: int
    measured: float | None
    kind: str
    states: float | None

    @property
    def fits(self) -> bool | None:
        """Whether the estimate is within the memory of the row's GPU."""
        return None if self.memory is None else self.memory.total <= usable_memory(self.row)

    @property
    def ratio(self) -> float | None:
        """The estimate in relation to the measured figure."""
        if self.memory is None or self.measured is None:
            return None
        memory = self.memory
        device = memory.reserved + memory.context
        return {ALLOCATED: memory.allocated, RESERVED: memory.reserved, DEVICE: device}[self.kind] / self.measured


def usable_memory(row: Row) -> float:
    """Return the bytes of a row's GPU."""
    return float(row["gpu_memory_gib"]) * GIB


def table_of(arguments: dict[str, Any], *, low_rank: int) -> ModelTable:
    """Return a model's parameters; with adapters of a rank all of them are frozen, and the adapters are trained."""
    job = JobArguments.of(arguments)
    parameters = []
    states = state_bytes(job)
    # Muon keeps one momentum of a matrix outside the vocabulary, Adam two of everything else
    # (`get_megatron_muon_optimizer`, megatron/core/optimizer/muon.py, core_v0.16.1).
    saved = 4 if arguments["optimizer"] == "muon" else 0
    for whole, shape in shapes_of(arguments).items():
        for name, part in parts_of(whole, shape, 1, job).items():
            layer, _ = split_layer(name)
            is_inside = layer is not None and layer.block in BLOCKS
            place = layer.number if is_inside and layer else -1 if name.startswith("embedding.") else (
                place_after_layers(name, job)
            )  # fmt: skip
            tokens = is_in_vocabulary(name)
            kept = states - (saved if len(part) == 2 and not tokens else 0)
            rows = (arguments["vocab_size"], *part[1:]) if tokens else part
            parameters.append(
                Parameter(
                    name, rows, 2, place, newest_cuts({name: part}, job)(name), parse(name).expert, tokens,
                    0 if low_rank else kept, 0, bool(job.use_distributed_optimizer), not low_rank,
                )
            )  # fmt: skip
            if low_rank and len(part) == 2 and not tokens and "router" not in name:
                parameters.append(
                    Parameter(
                        f"{name}.adapter", (low_rank, sum(part)), 2, place, None, parse(name).expert, False,
                        states, 0, bool(job.use_distributed_optimizer),
                    )
                )  # fmt: skip
    padded = PaddedRows(arguments["vocab_size"], 0, 128)
    return ModelTable(parameters, job.num_layers or 0, copies=embedding_copies(job), padded_rows=padded)


@cache
def _table(text: str, low_rank: int) -> ModelTable:
    return table_of(json.loads(text), low_rank=low_rank)


def layout_of(row: Row) -> dict[str, int]:
    """Return the published sizes, by their names in `ParallelLayout`."""
    tensor, expert = row["tp"] or 1, row["ep"] or 1
    expert_tensor = row["etp"] or (tensor if expert == 1 else (1 if tensor * 1 == tensor else 1))
    if expert == 1:
        expert_tensor = tensor
    return {
        "tensor": tensor, "pipeline": row["pp"] or 1, "virtual_pipeline": row["vpp"] or 1,
        "context": row["cp"] or 1, "expert": expert, "expert_tensor": expert_tensor,
    }  # fmt: skip


def result_of(row: Row, *, ranked: bool) -> Result:
    """Plan for a row's model and its number of GPUs, with its layout and without."""
    arguments = arguments_of(row)
    arguments["global_batch_size"] = arguments["global_batch_size"] or (row["dp"] or 1) * arguments["micro_batch_size"]
    job = JobArguments.of(arguments)
    table = _table(json.dumps(arguments, sort_keys=True), low_rank_of(row))
    buffers = buffers_of(job, table, RELEASE)
    old = ParallelLayout.from_arguments(job)
    request = SearchRequest(
        row["gpus"], node_of(row), RELEASE, round(usable_memory(row)), recomputation=recomputation_of(job, None),
        pins=layout_of(row),
    )  # fmt: skip
    pinned = search(job, table, old, request, buffers)
    figure = measured_of(row)
    states = states_of(row)
    rank, listed = None, 0
    if ranked and pinned.found:
        every = join_virtual_stages(search(job, table, old, replace(request, pins={}), buffers).found)
        listed = len(every)
        rank = next((n for n, line in enumerate(every, 1) if is_named(layout_of(row), *line)), None)
    reason = next((exclusion.reason for exclusion in pinned.nearest.values()), "")
    memory = pinned.found[0].memory if pinned.found else None
    return Result(row, reason if memory is None else "", memory, rank, listed, *figure, states)


def is_named(published: dict[str, int], one: FoundLayout, virtual_stages: Sequence[int]) -> bool:
    """Return whether a line of a plan names a layout."""
    named = sizes(one)
    return any(named | {"virtual_pipeline": size} == published for size in (named["virtual_pipeline"], *virtual_stages))


def node_of(row: Row) -> int:
    """Return the GPUs that NVLink connects: 72 in a rack of GB200 or GB300, otherwise those of a node."""
    return min(row["gpus"], 72) if row["gpu"] in ("GB200", "GB300") else 8


def is_held_out(row: Row) -> bool:
    """Return whether a setup was not looked at while the order of layouts was made: half of them, by their names."""
    return bool(hashlib.sha256(row["name"].encode()).digest()[-1] % 2)


def sizes(one: FoundLayout) -> dict[str, int]:
    """Return the sizes of a found layout."""
    layout = one.choice.layout
    names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
    return {name: getattr(layout, name) for name in names}


def measured_of(row: Row) -> tuple[float | None, str]:
    """Return the measured bytes, and what they hold."""
    for name, (unit, kind) in FIGURES.items():
        if (value := (row["measured"] or {}).get(name)) is not None:
            return float(value) * unit, kind
    return None, ALLOCATED


def is_foreseeable(row: Row) -> bool:
    """Return whether a setup ran out of memory for a reason that an estimate can know, with all that it needs."""
    reasons = ("expandable segments", "fragment", "graph", "unbalanced", "kernel")
    return row["seq_length"] is not None and not any(reason in str(row["notes"]).lower() for reason in reasons)


def states_of(row: Row) -> float | None:
    """Return the bytes that are allocated after a step, while nothing runs."""
    measured = row["measured"] or {}
    for name, unit in (("iter_alloc_gib", GIB), ("alloc_gb", 10**9)):
        if name in measured and row["outcome"] == "works":
            return float(measured[name]) * unit
    return None


def aggregates(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    """Yield the aggregate figures, by name."""
    works = [one for one in results if one.row["outcome"] == "works"]
    runs_out = [one for one in results if one.row["outcome"] == "oom" and is_foreseeable(one.row)]
    complete = [one for one in works if one.row["complete"]]
    yield "listed", _share([one.memory is not None for one in works])
    yield "working setups said to fit", _share([bool(one.fits) for one in complete])
    yield "out of memory, said not to fit", _share([not one.fits for one in runs_out])
    ranked = [one for one in complete if one.listed]
    for name, half in (("", ranked), (", held out", [one for one in ranked if is_held_out(one.row)])):
        yield f"among the first {FIRST}{name}", _share([one.rank is not None and one.rank <= FIRST for one in half])
    ratios = [one.ratio for one in complete if one.ratio is not None]
    errors = [abs(ratio - 1) for ratio in ratios]
    if errors:
        yield "median error of memory", f"{statistics.median(errors):.1%} of {len(errors)}"
        yield "memory within 20 %", _share([error <= 0.2 for error in errors])
        yield "lowest estimate", f"{min(ratios):.2f} of the measured memory"
    pairs = [(one.memory.static + one.memory.received, one.states) for one in works if one.memory and one.states]
    yield "states within 2 %", _share([abs(static / states - 1) <= 0.02 for static, states in pairs])


def _share(flags: Sequence[bool]) -> str:
    return f"{sum(flags)} of {len(flags)}" + (f" ({sum(flags) / len(flags):.0%})" if flags else "")


def line_of(one: Result) -> str:
    """Return a row of the table."""
    row, memory = one.row, one.memory
    if memory is None:
        return f"{row['name'][:58]:58} not listed: {one.reason}"
    ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
    measured = "" if one.measured is None else f"{one.measured / GIB:.1f}"
    parts = (memory.static, memory.activations, memory.backward, memory.loss, memory.step, memory.context, memory.total)
    return (
        f"{row['name'][:58]:58} {row['outcome']:5} {'fits' if one.fits else 'no':4} {row['gpu_memory_gib']:4} "
        + " ".join(f"{part / GIB:6.1f}" for part in parts)
        + f" {measured:>6} {ratio:>5} {one.rank or '':>5}/{one.listed or ''}"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--ranked", action="store_true", help="also search all layouts, for the place of each setup")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    options = parser.parse_args()
    rows = [row for row in json.loads(options.facts.read_text()) if options.only in row["name"]]
    rows = [row for row in rows if row["tp"] and row["ep"] is not None]
    names = ("state", "kept", "bwd", "loss", "step", "ctx", "total", "meas.")
    print(f"{'':58} {'':5} {'':4} {'GiB':>4} " + " ".join(f"{name:>6}" for name in names) + " ratio  rank")
    results = []
    for row in rows:
        results.append(result_of(row, ranked=options.ranked))
        print(line_of(results[-1]))
    print()
    for name, value in aggregates(results):
        print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
