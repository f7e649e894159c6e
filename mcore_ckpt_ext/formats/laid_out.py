"""The planned output of a conversion: files, records and notes, and the common parts of iteration folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.adapter_only import check_names
from mcore_ckpt_ext.formats.adapter_order import about_order
from mcore_ckpt_ext.formats.auxiliary_files import TOKENIZER_FOLDER, companion_notes
from mcore_ckpt_ext.formats.target import Target, installed_version, version_number
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.planning.write_plan import Output, OutputFile
from mcore_ckpt_ext.storage.checkpoint_dirs import RELEASE, TRACKER_FILE, iteration_name


@dataclass(frozen=True)
class OutputPlan:
    """The files to write, relative to the destination.

    Attributes:
        output: the files, what goes into them, and the notes for whoever reads them.
        folder: the iteration folder among them; empty where the destination itself is the checkpoint.
        kinds: the kinds that can be read back.
        left_out: names of the source's weights that the format has no place for.
        reads_optimizer: more than the weights is taken from the source.
        reads_back: opens what was written; None where `open_checkpoint` does.
    """

    output: Output
    folder: str
    kinds: Sequence[str]
    left_out: Sequence[str] = ()
    reads_optimizer: bool = True
    reads_back: Callable[[Path], CheckpointView] | None = None


def check_iteration(checkpoint: CheckpointView, target: Target) -> None:
    """Refuse a model that jobs of the version that will read it cannot have.

    Raises:
        UnsupportedCheckpointError: that version cannot build it, or its adapters have no place in the format.
    """
    if why := checkpoint.unbuildable(version_number(target.megatron_version)):
        raise UnsupportedCheckpointError(
            "that version of Megatron builds no such model", found=why, where=str(checkpoint.folder),
            hint="write for an earlier one: --megatron-version 0.18.0",
        )  # fmt: skip
    check_names(checkpoint, target)


def iteration(checkpoint: CheckpointView, target: Target, output: Output) -> OutputPlan:
    """The files of an iteration in a run folder of its own, with what belongs to it in every format.

    Args:
        checkpoint: the source.
        target: what is written.
        output: the iteration's own files, named within its folder.
    """
    folder = RELEASE if checkpoint.released else iteration_name(checkpoint.iteration)
    output = noting(output, [*checkpoint.notices(), *about_order(checkpoint)], _version_notes(target))
    return OutputPlan(_below(_with_companions(output, checkpoint), folder), folder, checkpoint.carried_kinds())


def noting(output: Output, notes: Sequence[str], before: Sequence[str] = ()) -> Output:
    """The same with further notes."""
    return replace(output, notes=(*before, *output.notes, *notes))


def with_files(output: Output, *small: OutputFile) -> Output:
    """The same with further files before its own."""
    return replace(output, files=[*small, *output.files])


def small_file(name: str, content: bytes, last: bool = False) -> OutputFile:
    """A file whose content is known; `last`: it is written once all others are."""
    return OutputFile(name, len(content), ((0, content),), last=last)


def _version_notes(target: Target) -> list[str]:
    """For which version the files are, where the user has named none: earlier ones may not read them."""
    if target.megatron_version is not None:
        return []
    return [f"written for Megatron {installed_version()}; for another: --megatron-version V"]


def _with_companions(output: Output, checkpoint: CheckpointView) -> Output:
    """The same, with the model's small files where Megatron keeps its tokenizer."""
    taken = checkpoint.auxiliary_files()
    small = [small_file(f"{TOKENIZER_FOLDER}/{name}", content) for name, content in taken.items()]
    return noting(with_files(output, *small), companion_notes(taken, checkpoint))


def _below(output: Output, folder: str) -> Output:
    """The same files in a folder of the destination, with the tracker file that names it."""
    files = [replace(file, name=f"{folder}/{file.name}") for file in output.files]
    named = folder if folder == "release" else str(int(folder.removeprefix("iter_")))
    files.append(small_file(TRACKER_FILE, named.encode(), last=True))
    records = [replace(record, file=f"{folder}/{record.file}") for record in output.records]
    return replace(output, files=files, records=records)
