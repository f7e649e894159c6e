"""The result of `plan` in words: the same for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore_ckpt_ext.continuity.mathematics import sentence_of
from mcore_ckpt_ext.errors import format_bytes, format_ranks, join_some, quantity
from mcore_ckpt_ext.job.dimensions import PINS, with_defaults

if TYPE_CHECKING:
    from mcore_ckpt_ext.layout_choice.memory import Memory
    from mcore_ckpt_ext.operations.layout_plan import LayoutPlan, PlannedLayout
    from mcore_ckpt_ext.rehearsal.result import Rehearsal

HEADER = ("layout", "layers", "memory", "fits", "bubble", "batch", "read/rank", "all read", "stock resumes")
FITS = HEADER.index("fits")
FEWER_HEADER = ("GPUs", "layout", "memory", "batch", "bubble")

Row = tuple[str, ...]


@dataclass(frozen=True)
class ShownPlan:
    """A list of layouts in words.

    Attributes:
        facts: what is known of the checkpoint and the GPUs: (label, value).
        remarks: remarks on arguments that are missing, or that the user replaced.
        header: the titles of the columns of `rows`.
        rows: a row for each layout.
        sentences: sentences about the layouts: which go on as before, and why others do not.
        best: sentences about the first layout.
        fewer_title: the title of the table `fewer`.
        fewer_header: the titles of its columns.
        fewer: a row for each layout of fewer GPUs.
    """

    facts: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...]
    header: Row
    rows: tuple[Row, ...]
    sentences: tuple[str, ...]
    best: tuple[str, ...]
    fewer_title: str
    fewer_header: Row
    fewer: tuple[Row, ...]


@dataclass(frozen=True)
class ShownRehearsal:
    """A rehearsal in words.

    Attributes:
        facts: the checkpoint, and the job that would resume it: (label, value).
        remarks: remarks on arguments that the user replaced.
        checked: what was checked: (label, result); empty after a refusal.
    """

    facts: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...]
    checked: tuple[tuple[str, str], ...]


def shown_plan(plan: LayoutPlan) -> ShownPlan:
    """Return a list of layouts in words."""
    size = "" if plan.gpu_memory is None else f"{format_bytes(plan.gpu_memory)}, "
    missing = f"missing from the checkpoint, defaults assumed: {', '.join(plan.unknown)}; set them with --argument"
    return ShownPlan(
        facts=(
            ("written by", plan.old_layout or "no job"),
            ("for", f"{quantity(plan.gpus, 'GPU')}, Megatron {plan.megatron_version} ({plan.megatron_version_source})"),
            ("parameters", f"{plan.parameters:,}"),
            ("memory of a GPU", f"{size}{plan.gpu_memory_source}"),
        ),
        remarks=(*([missing] if plan.unknown else ()), *_replacement_notes(plan.replaced)),
        header=HEADER,
        rows=tuple(map(_row, plan.layouts)),
        sentences=(*_virtual_stages(plan.layouts), *_data(plan.layouts), *_differences(plan.layouts)),
        best=tuple(_best(plan)) if plan.layouts else (),
        fewer_title="layouts of fewer GPUs that keep the tensor parallel size and the batch",
        fewer_header=FEWER_HEADER,
        fewer=tuple(map(_fewer_row, plan.fewer)),
    )


def shown_rehearsal(rehearsal: Rehearsal) -> ShownRehearsal:
    """Return a rehearsal in words."""
    source = f" ({rehearsal.megatron_version_source})" if rehearsal.megatron_version_source else ""
    rehearsed = f"{rehearsal.new_layout}, {quantity(rehearsal.gpus, 'GPU')}, Megatron {rehearsal.megatron_version}"
    labeled = (
        ("written by", rehearsal.old_layout),
        ("rehearsed", rehearsed + source),
        ("optimizer", rehearsal.optimizer_format),
        ("loaded by", rehearsal.loaded_by),
        ("because of", rehearsal.why),
    )
    return ShownRehearsal(
        facts=tuple((label, value) for label, value in labeled if value),
        remarks=_replacement_notes(rehearsal.replaced),
        checked=tuple(_check_rows(rehearsal)) if rehearsal.refusal is None else (),
    )


def _check_rows(rehearsal: Rehearsal) -> Iterator[tuple[str, str]]:
    yield (
        "optimizer",
        f"{quantity(rehearsal.elements, 'element')} of {quantity(rehearsal.parameters, 'parameter')} on "
        f"{quantity(rehearsal.gpus, 'rank')}, "
        f"each found once; placed by {' and '.join(rehearsal.order_sources)}",
    )
    yield "weights", f"{quantity(rehearsal.weights, 'element')}, each found once"
    yield "masters", _proof(rehearsal)
    yield (
        "to be read",
        f"{format_bytes(rehearsal.bytes_read)} by all ranks, of which the optimizer "
        f"{format_bytes(rehearsal.optimizer_bytes_read)}, as the job's line says",
    )
    if rehearsal.data:
        yield "data", rehearsal.data.sentence.removeprefix("data: ")
    yield "training", sentence_of(rehearsal.differences)


def _proof(rehearsal: Rehearsal) -> str:
    if not rehearsal.proven:
        return "none: masters and weights are derived from each other"
    how = "all" if rehearsal.is_full_proof else "samples of every parameter; --full compares all"
    return f"{quantity(rehearsal.proven, 'master')} {rehearsal.proof} ({how})"


def _replacement_notes(replaced: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"note: {sentence}" for sentence in replaced)


def _row(planned: PlannedLayout) -> Row:
    fits = "?" if planned.fits is None else "yes" if planned.fits else "no"
    return (
        planned.layout,
        _split(planned),
        format_bytes(planned.memory.total),
        fits,
        f"{planned.bubble:.0%}",
        _batch(planned),
        format_bytes(planned.read_per_rank),
        _seconds(planned),
        "yes" if planned.stock_resumes else "no",
    )


def _fewer_row(planned: PlannedLayout) -> Row:
    memory = format_bytes(planned.memory.total)
    return str(planned.gpus), planned.layout, memory, _batch(planned), f"{planned.bubble:.0%}"


def _batch(planned: PlannedLayout) -> str:
    """Return micro batch / global batch; a question mark for an unknown one."""
    return f"{planned.micro_batch_size} / {planned.global_batch_size or '?'}"


def _split(planned: PlannedLayout) -> str:
    """Return the number of layers per pipeline rank: `4`, or `1 to 4` if they differ."""
    counts = planned.layers_per_stage
    if len(set(counts)) <= 1:
        return str(counts[0]) if counts else ""
    return f"{min(counts)} to {max(counts)}"


def _seconds(planned: PlannedLayout) -> str:
    read = format_bytes(planned.read_in_all)
    return read if planned.seconds is None else f"{read}, {planned.seconds:,.0f} s"


def _virtual_stages(layouts: Sequence[PlannedLayout]) -> Iterator[str]:
    """Name the layouts that stand for others, which differ in virtual stages alone."""
    by_stages: dict[str, list[str]] = {}
    for planned in layouts:
        if planned.virtual_stages:
            by_stages.setdefault(format_ranks(sorted(planned.virtual_stages)), []).append(planned.layout)
    for stages, names in by_stages.items():
        yield f"or with VPP {stages}: {join_some(names)}"


def _data(layouts: Sequence[PlannedLayout]) -> Iterator[str]:
    """Name the layouts under which the data does not go on in its order, or only with this package."""
    by_sentence: dict[str, list[str]] = {}
    for planned in layouts:
        if planned.data.is_remarkable:
            hint = f"; to keep the order: {planned.data.hint}" if planned.data.hint else ""
            by_sentence.setdefault(f"{planned.data.sentence}{hint}", []).append(planned.layout)
    return _sentences_of_layouts(by_sentence, len(layouts))


def _differences(layouts: Sequence[PlannedLayout]) -> Iterator[str]:
    """Name the layouts under which training computes the same but for rounding, and why others do not."""
    by_sentence: dict[str, list[str]] = {}
    for planned in layouts:
        by_sentence.setdefault(sentence_of(planned.differences), []).append(planned.layout)
    return _sentences_of_layouts(by_sentence, len(layouts))


def _sentences_of_layouts(by_sentence: dict[str, list[str]], all_layouts: int) -> Iterator[str]:
    for sentence, names in by_sentence.items():
        yield f"{sentence}: {'all' if len(names) == all_layouts else join_some(names)}"


def _best(plan: LayoutPlan) -> Iterator[str]:
    best = plan.layouts[0]
    memory = best.memory
    yield (
        f"memory of the fullest GPU: weights {format_bytes(memory.weights)}, "
        f"gradients {format_bytes(memory.gradients)}, optimizer {format_bytes(memory.optimizer)}, "
        f"activations {_activations(plan)}"
    )
    yield f"and for a while: {_short_lived(memory)}; CUDA and NCCL {format_bytes(memory.context)}"
    if memory.host:
        yield f"in the memory of its host: {format_bytes(memory.host)} of the optimizer"
    yield (
        f"read by all ranks: {format_bytes(best.read_in_all)}; "
        f"with --ckpt-ext-read-once: {format_bytes(best.read_once)}"
    )
    yield f"to rehearse it: --gpus {plan.gpus} --rehearse '{_written_as_pins(best)}'"


def _written_as_pins(planned: PlannedLayout) -> str:
    """Return the sizes of a layout for `--rehearse`, without default sizes."""
    assumed = with_defaults({"tensor": planned.sizes["tp"]}) | {"tensor": 1}
    sizes = [f"{label}={planned.sizes[label]}" for label, name in PINS.items() if planned.sizes[label] != assumed[name]]
    return " ".join(sizes) or "tp=1"


def _short_lived(memory: Memory) -> str:
    """Return what is not needed at the same time: only the largest counts."""
    parts = {"the loss": memory.loss, "a layer's backward pass": memory.backward, "the optimizer's step": memory.step}
    return ", or ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size) or "nothing"


def _activations(plan: LayoutPlan) -> str:
    lacking = [name for name in ("seq_length", "hidden_size") if name in plan.unknown]
    if lacking:
        return f"not known without {lacking[0]}"
    return f"{format_bytes(plan.layouts[0].memory.activations)} (an estimate)"
