"""Declares a checkpoint format: how its folders are recognized, and which classes open and write them.

Each format declares one object, in `formats/<format>/format.py`; `registry.py` lists them. The command line lists what
it can write before torch is imported, so these modules import the reader and the writer only when they are used.
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
        family: the family of a Hugging Face folder whose `config.json` names no known one.
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
    """A format of checkpoints.

    Attributes:
        target: the class of its write options; None if the format is read only.
        name: how messages name it.
        takes_facts: whether a checkpoint may lack the arguments of its job, so that the user can pass them.
        is_adapter_folder: whether its folders contain adapters without their model.
        is_iteration: whether its folders are iterations of a run, with a tracker file in the run folder.
        required_files: files without which a save was not finished.
    """

    target: type[Options] | None = None
    name: ClassVar[str]
    takes_facts: ClassVar[bool] = False
    is_adapter_folder: ClassVar[bool] = False
    is_iteration: ClassVar[bool] = True
    required_files: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def recognizes(self, folder: Path) -> bool:
        """Whether a folder has the marker files of this format; damage is reported when it is opened."""

    @abstractmethod
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        """Open a folder; nothing but metadata is read.

        Raises:
            CheckpointError: it is damaged, or not read.
        """

    def lay_out(self, checkpoint: CheckpointView, target: Options, family: Family | None) -> OutputPlan:
        """Lay out the files of a conversion into the format; called only where there are options.

        Args:
            checkpoint: the source.
            target: what is to be written.
            family: of the model, by the user; by default it is recognized.

        Raises:
            UnsupportedCheckpointError: the format cannot hold this checkpoint.
            UsageError: an option has no meaning for it.
        """
        raise UnsupportedCheckpointError("the format is read, and not written", found=self.name)

    def own_files(self, folder: Path) -> tuple[str, ...]:
        """Regular expressions of the files that a folder in the format consists of.

        Returns:
            Empty if nothing shows that this package or Megatron wrote the folder, so that it is not replaced.

        Raises:
            CheckpointError: its marks are damaged.
        """
        return ()

    def list_tensors(self, folder: Path) -> Listing | None:
        """List the tensors and damaged files of a folder of weights, without its model.

        Returns:
            None if opening a folder already checks its files.
        """
        return None
