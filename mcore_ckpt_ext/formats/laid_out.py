"""The planned output of a conversion: files, records, messages, common parts of iteration folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.adapter_only import check_names
from mcore_ckpt_ext.formats.adapter_order import about_order
from mcore_ckpt_ext.formats.auxiliary_files import TOKENIZER_FOLDER, companion_notes
from mcore_ckpt_ext.formats.target import Target, installed_version, version_number
from mcore_ckpt_ext.formats.view import CheckpointView, carried_kinds
from mcore_ckpt_ext.planning.write_plan import Output, OutputFile
from mcore_ckpt_ext.storage.checkpoint_dirs import RELEASE, TRACKER_FILE, iteration_name


@dataclass(frozen=True)
class OutputPlan:
    """The files to write, relative to the destination.

    Attributes:
        output: the files, their content, and messages for the user.
        folder: the iteration folder among them; empty if the destination itself is the checkpoint.
        kinds: the kinds that can be read back.
        left_out: names of the source's weights that the format cannot hold.
        reads_optimizer: whether more than the weights is read from the source.
        reads_back: opens the result; None to use `open_checkpoint`.
    """

    output: Output
    folder: str
    kinds: Sequence[str]
    left_out: Sequence[str] = ()
    reads_optimizer: bool = True
    reads_back: Callable[[Path], CheckpointView] | None = None


def check_iteration(checkpoint: CheckpointView, target: Target) -> None:
    """Refuse a model that the target version of Megatron cannot build.

    Raises:
        UnsupportedCheckpointError: that version cannot build the model, or the format cannot hold its adapters.
    """
    if why := checkpoint.job.unbuildable(version_number(target.megatron_version)):
        raise UnsupportedCheckpointError(
            "that version of Megatron builds no such model",
            found=why,
            where=str(checkpoint.files.folder),
            hint="write for an earlier one: --megatron-version 0.18.0",
        )
    check_names(checkpoint, target)


def iteration(checkpoint: CheckpointView, target: Target, output: Output) -> OutputPlan:
    """Plan an iteration in a new run folder, with the files that every format has.

    Args:
        checkpoint: the source.
        target: the format to write.
        output: the iteration's own files, named within its folder.
    """
    folder = RELEASE if checkpoint.job.is_release else iteration_name(checkpoint.job.iteration())
    output = with_notes(
        output, [*checkpoint.format.notices(checkpoint), *about_order(checkpoint)], _version_notes(target)
    )
    return OutputPlan(_below(_with_companions(output, checkpoint), folder), folder, carried_kinds(checkpoint))


def with_notes(output: Output, notes: Sequence[str], before: Sequence[str] = ()) -> Output:
    """Return the same output with additional notes."""
    return replace(output, notes=(*before, *output.notes, *notes))


def with_files(output: Output, *small: OutputFile) -> Output:
    """Return the same output with additional files before its own."""
    return replace(output, files=[*small, *output.files])


def small_file(name: str, content: bytes, last: bool = False) -> OutputFile:
    """Return a file with known content; `last`: written after all other files."""
    return OutputFile(name, len(content), ((0, content),), last=last)


def _version_notes(target: Target) -> list[str]:
    """State the version that the files are written for if the user named none.

    Earlier versions may not read them.
    """
    if target.megatron_version is not None:
        return []
    return [f"written for Megatron {installed_version()}; for another: --megatron-version V"]


def _with_companions(output: Output, checkpoint: CheckpointView) -> Output:
    """Return the same output with the model's small files where Megatron keeps its tokenizer."""
    taken = checkpoint.files.auxiliary_files()
    small = [small_file(f"{TOKENIZER_FOLDER}/{name}", content) for name, content in taken.items()]
    return with_notes(with_files(output, *small), companion_notes(taken, checkpoint))


def _below(output: Output, folder: str) -> Output:
    """Move all files into a subfolder of the destination, and add the tracker file that names it."""
    files = [replace(file, name=f"{folder}/{file.name}") for file in output.files]
    named = folder if folder == "release" else str(int(folder.removeprefix("iter_")))
    files.append(small_file(TRACKER_FILE, named.encode(), last=True))
    records = [replace(record, file=f"{folder}/{record.file}") for record in output.records]
    return replace(output, files=files, records=records)
