"""Declares a checkpoint format: how folders are recognized, which classes open and write them.

Each format declares one object in `formats/<format>/format.py`; `registry.py` lists them. The command line lists the
formats that it can write before torch is imported, so these modules import reader and writer only on use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.target import Target
from mcore_ckpt_ext.job.facts import NOTHING, Facts

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.family import Family
    from mcore_ckpt_ext.formats.laid_out import OutputPlan
    from mcore_ckpt_ext.formats.listing import Listing
    from mcore_ckpt_ext.formats.reader import FormatReader
    from mcore_ckpt_ext.formats.view import CheckpointView
    from mcore_ckpt_ext.layout.parameter_order import ParameterOrder


@dataclass(frozen=True)
class OpenOptions:
    """Options for opening a folder.

    Attributes:
        order_sources: parameter orders to try when the packing of the gradient buffers is recovered.
        family: the family of a Hugging Face folder if its `config.json` does not name a supported one.
        transformer_impl: the layer spec under whose names a Hugging Face folder is read.
        facts: properties of the job that wrote a checkpoint without Megatron's arguments.
        model: the model of the adapters, if the folder contains only adapters.
    """

    order_sources: Sequence[ParameterOrder] = ()
    family: Family | None = None
    transformer_impl: str = "transformer_engine"
    facts: Facts = NOTHING
    model: CheckpointView | None = None


Options = TypeVar("Options", bound=Target)


class Format(ABC, Generic[Options]):
    """A checkpoint format.

    Attributes:
        target: the class of its write options; None if the format is only read.
        name: its name in messages.
        takes_facts: whether a checkpoint may lack the arguments of its job, so that the user can pass them.
        is_adapter_folder: whether its folders contain adapters without their model.
        is_iteration: whether its folders are iterations of a run, with a tracker file in the run folder.
        required_files: files without which a save is unfinished.
    """

    target: type[Options] | None = None
    name: ClassVar[str]
    takes_facts: ClassVar[bool] = False
    is_adapter_folder: ClassVar[bool] = False
    is_iteration: ClassVar[bool] = True
    required_files: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def recognizes(self, folder: Path) -> bool:
        """Return whether a folder has this format's marker files; damage is reported on opening it."""

    @abstractmethod
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        """Open a folder; only metadata is read.

        Raises:
            CheckpointError: the folder is damaged or not supported.
        """

    def lay_out(self, checkpoint: CheckpointView, target: Options, family: Family | None) -> OutputPlan:
        """Lay out the files of a conversion into the format; called only for formats with write options.

        Args:
            checkpoint: the source.
            target: the options of the format to write.
            family: the model's family as passed by the user; recognized by default.

        Raises:
            UnsupportedCheckpointError: the format cannot hold this checkpoint.
            UsageError: an option does not apply to this checkpoint.
        """
        raise UnsupportedCheckpointError("the format is read, and not written", found=self.name)

    def own_files(self, folder: Path) -> tuple[str, ...]:
        """Return regular expressions that match the files of a folder in the format.

        Returns:
            Empty if nothing shows that this package or Megatron wrote the folder, so that it is not replaced.

        Raises:
            CheckpointError: its marker files are damaged.
        """
        return ()

    def list_tensors(self, folder: Path) -> Listing | None:
        """List the tensors and damaged files of a folder of weights, without its model.

        Returns:
            None if opening a folder already checks its files.
        """
        return None
