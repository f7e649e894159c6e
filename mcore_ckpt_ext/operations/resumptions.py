"""Determines which Megatron wrote a checkpoint, by which evidence, and which Megatron can resume it.

Megatron does not record its version. Every piece of evidence is a bound that some file or key implies; together they
leave a range. Sources: megatron/core/dist_checkpointing and megatron/training/checkpointing.py, core_v0.7.0 to
0.19.2; the arguments were compared in megatron/training/arguments.py of every release.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mcore_ckpt_ext.formats.evidence import Bound, Loading
from mcore_ckpt_ext.formats.portable_state import WRITTEN_FOR
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.loops.bridge import RUN_CONFIG
from mcore_ckpt_ext.job.releases import (
    RESUMES_WITH_THIS_PACKAGE,
    STORES_COMMON_STATE_AS_OBJECT,
    releases_between,
    releases_by_arguments,
)
from mcore_ckpt_ext.operations.stored_failures import stock_failure
from mcore_ckpt_ext.optimizers.table import encodings_named, stock_can_load
from mcore_ckpt_ext.versions import KNOWN, NEWEST, OLDEST, Version, parse_version


@dataclass(frozen=True, slots=True)
class Evidence:
    """An observation that bounds the release of the writer.

    Attributes:
        what: what was observed.
        first: the first release that writes so; empty if any may be the first.
        last: the last release that writes so; empty if any may be the last.
    """

    what: str
    first: str
    last: str


@dataclass(frozen=True)
class Writer:
    """The writer of a checkpoint.

    Attributes:
        version: the release of Megatron or a range of releases, or another program.
        evidence: the observations from which it follows.
        first: the earliest release possible.
        converted: a conversion of this package wrote it, so that no rank of a job wrote any of its files.
    """

    version: str
    evidence: tuple[Evidence, ...]
    first: Version
    converted: bool = False


@dataclass(frozen=True, slots=True)
class Resumption:
    """A program that resumes a checkpoint with its optimizer.

    Attributes:
        who: the program.
        versions: its releases, in words.
        layouts: the layouts under which it does so, in words.
        note: a condition or a warning; empty without one.
    """

    who: str
    versions: str
    layouts: str
    note: str = ""


def writer_of(checkpoint: CheckpointView) -> Writer:
    """Determine the writer; if bounds contradict each other (a fork, an edited checkpoint) it is unknown."""
    if foreign := checkpoint.format.foreign_writer:
        return Writer(foreign, (), OLDEST)
    sidecar = checkpoint.job.found_sidecar().sidecar
    if sidecar is not None and (recorded := sidecar.megatron):
        only = Evidence(f"the sidecar of mcore_ckpt_ext records {recorded}", recorded, recorded)
        return Writer(_version_of_loop(checkpoint, recorded), (only,), parse_version(recorded) or OLDEST)
    if written_for := _written_for(checkpoint):
        # Its arguments are those of the source's job, and its index has no plans of ranks.
        only = Evidence("written by mcore-ckpt convert, as recorded", written_for, written_for)
        whom = f"{'Megatron-Bridge on ' if _is_of_bridge(checkpoint) else ''}Megatron {written_for}"
        return Writer(f"mcore-ckpt convert, for {whom}", (only,), parse_version(written_for) or OLDEST, converted=True)
    if checkpoint.format.is_of_convert and checkpoint.job.is_release:
        return Writer("mcore-ckpt convert", (), OLDEST, converted=True)
    bounds = list(_bounds(checkpoint))
    first = max((low for _, low, _ in bounds if low), default=OLDEST)
    last = min((high for _, _, high in bounds if high), default=NEWEST)
    evidence = tuple(Evidence(observation, str(low or ""), str(high or "")) for observation, low, high in bounds)
    possible = releases_between(first, last)
    if not possible:
        return Writer("unknown: the evidence contradicts itself", evidence, OLDEST)
    version = _version_of_loop(checkpoint, _span(possible))
    if checkpoint.format.is_of_convert:
        return Writer(f"mcore-ckpt convert, of a checkpoint of Megatron {version}", evidence, first, converted=True)
    return Writer(version, evidence, first)


def has_job(checkpoint: CheckpointView, writer: Writer) -> bool:
    """Return True if a job saved the checkpoint, or the one that it was converted from.

    Otherwise it has no layout. Legacy files are stored by rank, so that they always have a layout.
    """
    traits = checkpoint.format
    return traits.is_of_job and (not (writer.converted and checkpoint.job.is_release) or traits.loading.by_rank)


def _written_for(checkpoint: CheckpointView) -> str:
    """Return the version that a conversion was written for; empty if it is no conversion."""
    arguments = checkpoint.job.arguments()
    in_common = None if arguments.is_complete else checkpoint.job.common().get(WRITTEN_FOR)
    return str(arguments.raw.get(WRITTEN_FOR) or in_common or "")


def _is_of_bridge(checkpoint: CheckpointView) -> bool:
    return checkpoint.job.described_by() == RUN_CONFIG


def _version_of_loop(checkpoint: CheckpointView, version: str) -> str:
    """Return a version of Megatron, with the name of the training loop if it was another one."""
    return f"Megatron-Bridge on Megatron Core {version}" if _is_of_bridge(checkpoint) else version


def _bounds(checkpoint: CheckpointView) -> Iterator[Bound]:
    yield from checkpoint.job.evidence()
    arguments = checkpoint.job.arguments()
    if not arguments.is_complete:
        return
    first, last = releases_by_arguments(arguments)
    if first:
        yield f"its arguments have {first[1]}", first[0], None
    if arguments.raw and last:
        yield f"its arguments lack {last[1]}", None, last[0]


def resumptions(checkpoint: CheckpointView, writer: Writer) -> list[Resumption]:
    """List the programs that resume the checkpoint with its optimizer.

    These are stock Megatron, from the writer's release on, and Megatron with this package.
    """
    loading = checkpoint.format.loading
    if not loading.in_megatron:
        if start := checkpoint.format.starts_jobs():
            return [Resumption("Megatron with mcore_ckpt_ext", "", "any", start)]
        return [Resumption("not resumable as is", "", "", f"convert it first: {checkpoint.format.conversion}")]
    if loading.failure:
        return [*_torch_fsdp_resumptions(writer, loading)]
    if loading.flag:
        return [*_fsdp_resumptions(checkpoint, writer, loading)]
    if not checkpoint.job.arguments().is_complete:
        return [*_other_loop_resumptions(checkpoint)]
    releases = _readers(loading, writer)
    own_layout = f"its own: {checkpoint.job.layout}; another DP if the gradient buffers stay the same"
    same = [v for v in releases if stock_resumes(checkpoint, False, v)]
    other = [v for v in releases if stock_resumes(checkpoint, True, v)]
    resumable = []
    if other:
        resumable.append(Resumption("stock Megatron", _span(other), "any", _stock_note(checkpoint)))
    if rest := [v for v in same if v not in other]:
        resumable.append(Resumption("stock Megatron", _span(rest), own_layout, _stock_note(checkpoint)))
    if not resumable:
        resumable.append(Resumption("stock Megatron", "none", "none", _stock_note(checkpoint)))
    if checkpoint.optimizer.format() is None or encodings_named(checkpoint.optimizer.format()):
        resumable.append(_package_resumption(checkpoint, writer))
    return resumable


def _package_resumption(checkpoint: CheckpointView, writer: Writer) -> Resumption:
    """Return the releases in which this package resumes the checkpoint.

    They may be earlier than the writer's, if the job uses the distributed optimizer; those that require `common.pt`
    then reinitialize random states (`megatron/sources/legacy_state_dict.py`).
    """
    first = OLDEST if checkpoint.job.arguments().use_distributed_optimizer else min(writer.first, NEWEST)
    releases = [version for version in releases_between(first) if RESUMES_WITH_THIS_PACKAGE.is_of(version)]
    releases += _unknown_release(writer)
    note = "tested with 0.16.1, 0.19.0 and 0.19.2"
    changed = STORES_COMMON_STATE_AS_OBJECT
    if first < writer.first and changed.is_of(writer.first) and not checkpoint.format.loading.by_rank:
        note = f"before {changed.since} with new random states, if the release has the job's options; {note}"
    return Resumption("Megatron with mcore_ckpt_ext", _span(releases), "any", note)


def _readers(loading: Loading, writer: Writer) -> list[Version]:
    """Return the releases that read a format, from the writer's on."""
    return [*loading.releases(min(writer.first, NEWEST)), *_unknown_release(writer)]


def _unknown_release(writer: Writer) -> list[Version]:
    """Return the writer's release if it is not a known one: it resumes what it wrote."""
    return [] if writer.first in KNOWN else [writer.first]


def _fsdp_resumptions(checkpoint: CheckpointView, writer: Writer, loading: Loading) -> Iterator[Resumption]:
    releases = _readers(loading, writer)
    own_layout = f"its own: {checkpoint.job.layout}; another DP"
    yield Resumption(f"stock Megatron with {loading.flag}", _span(releases), own_layout, _stock_note(checkpoint))
    yield Resumption(
        "stock Megatron without it", "none", "none", "convert it: mcore-ckpt convert SRC DST --to torch_dist"
    )
    yield Resumption("Megatron with mcore_ckpt_ext, without it", _span(releases), "any", "tested with 0.19.2")


def _torch_fsdp_resumptions(writer: Writer, loading: Loading) -> Iterator[Resumption]:
    """Yield resumptions of torch's FSDP checkpoints, see `megatron/sources/torch_fsdp.py`."""
    releases = _span(_readers(loading, writer))
    yield Resumption("stock Megatron", "none", "none", loading.failure)
    yield Resumption(f"Megatron with mcore_ckpt_ext, {loading.flag}", releases, "TP1, any DP", "tested with 0.19.2")
    yield Resumption("Megatron with mcore_ckpt_ext, without it", releases, "any", "tested with 0.19.2")


def _other_loop_resumptions(checkpoint: CheckpointView) -> Iterator[Resumption]:
    """Yield resumptions of a checkpoint without Megatron's arguments.

    Stock `load_checkpoint` needs them.
    """
    described = _is_of_bridge(checkpoint)
    other = stock_can_load(checkpoint.optimizer.format(), True, NEWEST)
    own_layout = f"its own: {checkpoint.job.layout}; another DP if the gradient buffers stay the same"
    who = "Megatron-Bridge" if described else "the training loop that wrote it"
    yield Resumption(who, "", "any" if other else own_layout, _stock_note(checkpoint))
    yield Resumption(
        "stock Megatron", "none", "none", "to add the arguments: mcore-ckpt convert SRC DST --to torch_dist"
    )
    yield Resumption("Megatron with mcore_ckpt_ext", "", "any", "tested with 0.19.2")
    if described:
        yield Resumption("Megatron-Bridge with mcore_ckpt_ext", "", "any", "tested with 0.6.2 and 0.3.1")


def stock_resumes(checkpoint: CheckpointView, placement_changed: bool, version: Version) -> bool:
    """Return whether stock Megatron resumes a checkpoint, with its optimizer if it has one.

    Args:
        checkpoint: the checkpoint.
        placement_changed: whether the gradient buffers of the job differ from those of the job that wrote it.
        version: the release of Megatron that runs.
    """
    loading = checkpoint.format.loading
    # Without stored arguments stock Megatron assumes that the checkpoint has layout TP1 x PP1.
    is_moved = placement_changed or _is_of_bridge(checkpoint)
    return (
        loading.is_read_by(version)
        and not loading.failure
        # Rank folders are found by the running layout (`get_checkpoint_name`), whatever they contain.
        and not (loading.by_rank and placement_changed)
        and not _lacks_natural_shapes(checkpoint)
        and stock_can_load(checkpoint.optimizer.format(), is_moved, version)
        and stock_failure(checkpoint) is None
    )


def _lacks_natural_shapes(checkpoint: CheckpointView) -> bool:
    """Return whether torch wrote the index without the natural shapes of reshaped optimizer state.

    Stock Megatron needs them (`get_reformulation_metadata`, megatron/core/dist_checkpointing/strategies/torch.py,
    core_v0.8.0 to 0.15.3); this package derives them.
    """
    index = checkpoint.files.stored_index()
    is_reshaped = any(encoding.is_reshaped for encoding in encodings_named(checkpoint.optimizer.format()))
    return is_reshaped and index is not None and index.may_lack_attributes and not index.natural_shapes


def _stock_note(checkpoint: CheckpointView) -> str:
    if checkpoint.optimizer.format() is None:
        return "it holds no optimizer"
    if _lacks_natural_shapes(checkpoint):
        return "its index lacks the natural shapes of the optimizer state, as torch 2.9 to 2.11 write it"
    if failure := stock_failure(checkpoint):
        return failure.consequence
    # A conversion does not repeat errors that Megatron may have made when it saved.
    intact = bool(_written_for(checkpoint))
    encodings = encodings_named(checkpoint.optimizer.format())
    return "; ".join(
        encoding.note for encoding in encodings if encoding.note and not (intact and encoding.may_be_shifted)
    )


def _span(versions: Sequence[Version]) -> str:
    """Format consecutive versions: `0.8 to 0.15`, or one version."""
    if not versions:
        return "none"
    return str(versions[0]) if len(versions) == 1 else f"{str(versions[0])} to {str(versions[-1])}"
