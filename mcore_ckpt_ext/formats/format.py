"""A checkpoint format: its properties, and the reader and writer that are imported on use.

`registry.py` lists the formats. The command line lists those that it can write before torch is imported, so a format
names its reader and writer instead of importing them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.target import Target

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.family import Family
    from mcore_ckpt_ext.formats.laid_out import OutputPlan
    from mcore_ckpt_ext.formats.listing import Listing
    from mcore_ckpt_ext.formats.open_options import OpenOptions
    from mcore_ckpt_ext.formats.reader import FormatReader
    from mcore_ckpt_ext.formats.view import CheckpointView
    from mcore_ckpt_ext.job.job_arguments import JobArguments
    from mcore_ckpt_ext.storage.dcp_index import FolderIndex


@dataclass(frozen=True)
class Format:
    """A checkpoint format.

    Attributes:
        name: its name in messages.
        reader: the subclass of `FormatReader` that recognizes and opens its folders, as `module:class`.
        target: the class of its write options; None if the format is only read.
        writer: the function that lays out the files of a conversion, as `module:function`.
        reader_arguments: the function that returns the arguments of the job that will read a conversion, as
            `module:function`; empty if the files do not depend on its layout.
        lister: the function that lists the tensors and damaged files of a folder of weights without their model, as
            `module:function`; empty if opening a folder already checks its files.
        takes_facts: whether a checkpoint may lack the arguments of its job, so that the user can pass them.
        is_adapter_folder: whether its folders contain adapters without their model.
        is_loaded_as_stored: whether Megatron's own loop loads it without being given it as another format.
        is_of_one_layout: whether conversions write it for one parallel layout.
        is_iteration: whether its folders are iterations of a run, with a tracker file in the run folder.
        required_files: files without which a save is unfinished.
        own_files: regular expressions that match all files of a folder; without them, no folder is replaced.
    """

    name: str
    reader: str
    target: type[Target] | None = None
    writer: str = ""
    reader_arguments: str = ""
    lister: str = ""
    takes_facts: bool = False
    is_adapter_folder: bool = False
    is_loaded_as_stored: bool = False
    is_of_one_layout: bool = False
    is_iteration: bool = True
    required_files: tuple[str, ...] = ()
    own_files: tuple[str, ...] = ()

    @property
    def reader_class(self) -> type[FormatReader]:
        """The class of its reader."""
        imported: type[FormatReader] = _import(self.reader)
        return imported

    def recognizes(self, stored: FolderIndex) -> bool:
        """Return whether the folder of an index is in this format; damage is reported on opening it."""
        return self.reader_class.recognizes(stored)

    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        """Open a folder; only metadata is read.

        Raises:
            CheckpointError: the folder is damaged or not supported.
        """
        return self.reader_class(folder, options)

    def lay_out(self, checkpoint: CheckpointView, target: Target, family: Family | None) -> OutputPlan:
        """Lay out the files of a conversion into the format.

        Args:
            checkpoint: the source.
            target: the options of the format to write.
            family: the model's family as passed by the user; recognized by default.

        Raises:
            UnsupportedCheckpointError: the format cannot hold this checkpoint.
            UsageError: an option does not apply to this checkpoint.
        """
        if not self.writer:
            raise UnsupportedCheckpointError("the format is read, and not written", found=self.name)
        lay_out: Callable[[CheckpointView, Target, Family | None], OutputPlan] = _import(self.writer)
        return lay_out(checkpoint, target, family)

    def arguments_of_reader(self, checkpoint: CheckpointView, target: Target) -> JobArguments | None:
        """Return the arguments of the job that will read a conversion; None if its layout does not matter.

        Raises:
            UsageError: neither the source nor the options name its layout.
        """
        if not self.reader_arguments:
            return None
        arguments: JobArguments = _import(self.reader_arguments)(checkpoint, target)
        return arguments

    def list_tensors(self, folder: Path) -> Listing | None:
        """List the tensors and damaged files of a folder; None if opening it already checks its files."""
        if not self.lister:
            return None
        listing: Listing = _import(self.lister)(folder)
        return listing

    def files_to_replace(self, folder: Path) -> tuple[str, ...]:
        """Return regular expressions that match the files of a folder in the format.

        Returns:
            Empty if nothing shows that this package or Megatron wrote the folder, so that it is not replaced.

        Raises:
            CheckpointError: its marker files are damaged.
        """
        return self.own_files if self.own_files and self.reader_class.may_be_replaced(folder) else ()


def _import(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
