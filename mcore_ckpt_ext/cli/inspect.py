"""`mcore-ckpt inspect`: show the content of a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mcore_ckpt_ext.cli.folding import group_by, strip_numbers, unread_rows
from mcore_ckpt_ext.cli.options import add_facts, add_weights, facts_of
from mcore_ckpt_ext.cli.output import BAD, REMARKABLE, Painted, heading, line, table
from mcore_ckpt_ext.cli.page import check_page_file, inspection_page
from mcore_ckpt_ext.cli.report import report
from mcore_ckpt_ext.errors import format_bytes, quantity
from mcore_ckpt_ext.storage.paths import as_path

if TYPE_CHECKING:
    from mcore_ckpt_ext.operations.inspection_result import Inspection, StoredFile

_FILES_SHOWN = 32
_RANKS_SHOWN = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("path", metavar="PATH", help="run folder (newest iteration), iteration or canonical folder")
    parser.add_argument("--all", action="store_true", help="list every file, and the tensors in it")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--html", metavar="FILE", type=as_path, help="also write a self-contained page")
    add_weights(parser)
    add_facts(parser)


def run(arguments: argparse.Namespace) -> int:
    """Inspect, and report the content."""
    from mcore_ckpt_ext.operations.inspection import inspect

    if arguments.html is not None:
        check_page_file(arguments.html)
    inspection = inspect(
        arguments.path,
        buffers=arguments.html is not None or arguments.json,
        facts=facts_of(arguments),
        weights=arguments.weights,
    )
    return report(arguments, "inspect", inspection, page=inspection_page, show=partial(_show, show_all=arguments.all))


def _layout(inspection: Inspection) -> str:
    """Return the layout, and its source if this is not Megatron's arguments."""
    if not inspection.layout_text:
        return "none recorded"
    ranks = f", {_ranks(world)}" if (world := inspection.layout["world"]) is not None else ""
    source = f", by {inspection.described_by} and the index" if inspection.described_by else ""
    of_source = inspection.writer.converted and not _is_of_one_layout(inspection.path)
    return f"{inspection.layout_text}{ranks}{source}{', of the job that saved the source' if of_source else ''}"


def _is_of_one_layout(folder: str) -> bool:
    from mcore_ckpt_ext.formats.registry import format_of

    folder_format = format_of(as_path(folder))
    return folder_format is not None and folder_format.is_of_one_layout


def _show(inspection: Inspection, *, show_all: bool) -> None:
    line(inspection.path)
    table(
        [
            ("format", inspection.format),
            ("optimizer", ": ".join(filter(None, (inspection.optimizer_format, inspection.optimizer))) or "none"),
            ("layout", _layout(inspection)),
            ("iteration", "none recorded" if inspection.iteration is None else inspection.iteration),
            ("written by", _writer(inspection.writer.version)),
            ("sidecar", _sidecar(inspection)),
        ]
    )
    if inspection.optimizer_format and not inspection.model["parameters"]:
        from mcore_ckpt_ext.formats.external_weights import NAME_THEM

        line(Painted(f"note: optimizer only; {NAME_THEM}", REMARKABLE))
    for problem in inspection.unbelieved:
        line(Painted(f"note: {problem}", REMARKABLE))
    if inspection.writer.evidence:
        heading("evidence for the version")
        table([(item.what, _bounds(item.first, item.last)) for item in inspection.writer.evidence])
    heading("model")
    table([(name, _number(value)) for name, value in inspection.model.items()])
    if inspection.training:
        heading("training")
        table([(name, _number(value)) for name, value in inspection.training.items()])
    if inspection.data:
        heading("data")
        table(list(inspection.data.items()))
    heading("bytes")
    overhead = max(0, inspection.bytes_on_disk - sum(inspection.bytes_by_kind.values()))
    sizes = {**inspection.bytes_by_kind, "archive overhead": overhead, "on disk": inspection.bytes_on_disk}
    table([(kind, format_bytes(size)) for kind, size in sizes.items()], right=[1])
    heading("files")
    _show_files(inspection, show_all=show_all)
    if inspection.account.not_looked_at:
        heading("not read")
        table([(row.keys, row.size, row.why) for row in unread_rows(inspection.account.not_looked_at)], right=[1])
    heading("can be resumed by, optimizer included")
    table([(item.who, item.versions, item.layouts, item.note) for item in inspection.resumptions])


def _sidecar(inspection: Inspection) -> str:
    if inspection.sidecar_problem:
        return f"ignored: {inspection.sidecar_problem}"
    return "yes: the packing of the gradient buffers is recorded" if inspection.sidecar else "no"


def _writer(version: str) -> str:
    return f"Megatron {version}" if version[:1].isdigit() else version


def _show_files(inspection: Inspection, *, show_all: bool) -> None:
    """List the files; if there are many, those that differ only in numbers share a line."""
    if show_all or len(inspection.files) <= _FILES_SHOWN:
        table((_file_row(file, with_names=show_all) for file in inspection.files), right=[2])
    else:
        rows = [_folded_row(files) for files in group_by(inspection.files, _kind_of_file)]
        table(rows[:_FILES_SHOWN], right=[2])
        more = len(rows) - _FILES_SHOWN
        line(f"  {f'and {more:,} more; ' if more > 0 else ''}--all lists every file, with its tensors")
    if any(file.rank is not None for file in inspection.files):
        line("  __x_y.distcp: written by global rank x, writer process y of that rank")
    if inspection.silent_ranks:
        names = ", ".join(map(str, inspection.silent_ranks[:_RANKS_SHOWN]))
        more_ranks = ", ..." if len(inspection.silent_ranks) > _RANKS_SHOWN else ""
        line(f"  no file from {_ranks(len(inspection.silent_ranks))} ({names}{more_ranks}): {inspection.why_silent}")


def _kind_of_file(file: StoredFile) -> tuple[str, bool]:
    return strip_numbers(file.file), file.bytes_on_disk is None


def _folded_row(files: Sequence[StoredFile]) -> tuple[object, ...]:
    """Return one line for files that differ only in numbers: range, count and sizes."""
    if len(files) == 1:
        return _file_row(files[0], with_names=False)
    ranks = sorted({file.rank for file in files if file.rank is not None})
    sizes = [file.bytes_on_disk for file in files if file.bytes_on_disk is not None]
    smallest, largest = (format_bytes(size) for size in (min(sizes, default=0), max(sizes, default=0)))
    each = smallest if smallest == largest else f"{smallest} to {largest}"
    return (
        f"{files[0].file} to {files[-1].file}",
        quantity(len(files), "file") + (f" from ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else ""),
        each if sizes else Painted("MISSING", BAD),
        f"{quantity(sum(file.records for file in files), 'record')}, {format_bytes(sum(sizes))} in all",
    )


def _ranks(count: int) -> str:
    return quantity(count, "rank")


def _file_row(file: StoredFile, *, with_names: bool) -> tuple[object, ...]:
    """Return the line of one file, with the names of its tensors or their number."""
    who = "" if file.rank is None else f"rank {file.rank}, writer {file.writer}"
    size: object = Painted("MISSING", BAD) if file.bytes_on_disk is None else format_bytes(file.bytes_on_disk)
    tensors = len(file.tensors)
    held = f": {', '.join(file.tensors)}" if with_names else f" of {quantity(tensors, 'tensor')}"
    place = f"{who} ({file.place})" if who else file.place
    return file.file, place, size, f"{quantity(file.records, 'record')}{held}"


def _bounds(first: str, last: str) -> str:
    if first and last:
        return first if first == last else f"{first} to {last}"
    return f"{first} or later" if first else f"{last} or earlier"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
