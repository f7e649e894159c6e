"""Base class of the readers of all formats, which return the parts of a checkpoint (`parts.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from mcore_ckpt_ext.errors import ContentError, UnreadableCheckpointError, UsageError, format_value
from mcore_ckpt_ext.formats.auxiliary_files import TOKENIZER_FOLDER, auxiliary_files
from mcore_ckpt_ext.formats.description import megatron_arguments, stored_arguments
from mcore_ckpt_ext.formats.grid import weight_grid
from mcore_ckpt_ext.formats.messages import general_notices
from mcore_ckpt_ext.formats.open_options import DEFAULT_OPTIONS, OpenOptions
from mcore_ckpt_ext.formats.parts import Files, Job, States, StoredOptimizer, StoredWeights, Weights, lazy
from mcore_ckpt_ext.formats.sidecar_file import FoundSidecar, find_sidecar
from mcore_ckpt_ext.formats.stacking import sharded_keys
from mcore_ckpt_ext.formats.stored_parts import StoredParts
from mcore_ckpt_ext.formats.view import CheckpointView, OpenedFormat
from mcore_ckpt_ext.layout.local_model import LocalModels, StoredWeight
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.storage.checkpoint_dirs import RELEASE, iteration_number
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from mcore_ckpt_ext.storage.remote import folder_reader
from mcore_ckpt_ext.transfer import Transfer

_MOST_ITERATIONS = 1 << 40


class FormatReader(ABC):
    """Reads one iteration folder; tensors are read only on request.

    A reader overrides the parts whose defaults are wrong for its format, and replaces those fields of them.

    Attributes:
        name: the name of the format.
        folder: the `iter_XXXXXXX` or `release` folder.
        options: the options with which it was opened.
        folder_index: the index of the folder, which is read once.
    """

    name: ClassVar[str]

    def __init__(self, folder: Path, options: OpenOptions = DEFAULT_OPTIONS) -> None:
        """Open a folder.

        Args:
            folder: the `iter_XXXXXXX` or `release` folder.
            options: the options, of which those apply that the format has.

        Raises:
            UnreadableCheckpointError: metadata is missing or damaged.
            UnsupportedCheckpointError: this version cannot read the checkpoint.
        """
        self.folder = folder
        self.options = options
        self.folder_index = options.index or FolderIndex(folder)

    @classmethod
    @abstractmethod
    def recognizes(cls, stored: FolderIndex) -> bool:
        """Return whether the folder of an index is in the format; damage is reported on opening it."""

    @classmethod
    def may_be_replaced(cls, folder: Path) -> bool:
        """Return whether this package or Megatron wrote a folder, as far as its files show.

        Raises:
            CheckpointError: its marker files are damaged.
        """
        return True

    @cached_property
    @abstractmethod
    def _weights(self) -> Weights:
        """The model's arrays."""

    @abstractmethod
    def _read_common(self) -> dict[str, Any]:
        """Read the common state: arguments, iteration, scheduler and the like."""

    @cached_property
    def view(self) -> CheckpointView:
        """The checkpoint."""
        return CheckpointView(self.format, self.files, self.model, self.optimizer, self.job, self.states)

    @cached_property
    def format(self) -> OpenedFormat:
        """The format."""
        return OpenedFormat(
            self.name,
            self,
            notices=general_notices,
            with_weights_of=lambda _: _refuse_weights(self.name, self.folder),
            with_weights_of_a_job=lambda _: self.view,
        )

    @cached_property
    def files(self) -> Files:
        """The stored bytes."""
        reader = folder_reader(self.folder)
        return Files(
            self.folder,
            reader,
            Transfer(reader),
            stored_parts=lambda: parts_of_tensors(self.view, self.view.kinds()),
            auxiliary_files=lambda: auxiliary_files(self.folder, self.files.auxiliary_files_below),
            auxiliary_files_below=TOKENIZER_FOLDER,
        )

    @cached_property
    def model(self) -> StoredWeights:
        """The model."""
        return StoredWeights(
            weights=lambda: self._weights,
            sharded_keys=lambda: sharded_keys(self.model.weights().names(), self.job.arguments()),
        )

    @property
    @abstractmethod
    def optimizer(self) -> StoredOptimizer:
        """The optimizer."""

    @cached_property
    def job(self) -> Job:
        """The job that wrote the checkpoint."""
        return Job(
            common=lazy(self._read_common),
            arguments=lazy(
                lambda: megatron_arguments(
                    stored_arguments(self.job.common()), self.folder, self.job.found_sidecar().sidecar
                )
            ),
            iteration=lambda: _iteration(self.job.common(), self.folder),
            is_release=self.folder.name == RELEASE,
            models=lazy(lambda: _local_models(self.view)),
            observed_orders=lambda: self.options.order_sources,
            found_sidecar=lazy(lambda: _sidecar(self.folder_index, self.job.common)),
        )

    @cached_property
    def states(self) -> States:
        """State that belongs neither to the model's tensors nor to the optimizer."""
        return States()


def parts_of_tensors(checkpoint: CheckpointView, kinds: Iterable[str]) -> Iterator[StoredParts]:
    """Yield the slices of every tensor of some kinds."""
    for kind in kinds:
        for name in checkpoint.names(kind):
            if slices := checkpoint.stored_slices(kind, name):
                places = [(extent.file, part.numel * ITEM_SIZE[extent.dtype]) for part, extent, _ in slices]
                yield StoredParts(kind, name, places)


def _iteration(common: dict[str, Any], folder: Path) -> int:
    """Return the training iteration.

    It is the number in the folder's name if the common state does not record one.

    Raises:
        UnreadableCheckpointError: the recorded iteration is not a valid number.
    """
    number = common.get("iteration", iteration_number(folder) or 0)
    if type(number) is not int or not 0 <= number < _MOST_ITERATIONS:
        raise UnreadableCheckpointError(
            "invalid iteration number in the checkpoint", found=format_value(number),
            expected="a whole number", where=str(folder), hint="its common state was edited: use another iteration",
        )  # fmt: skip
    return number


def _sidecar(stored: FolderIndex, read_common: Callable[[], dict[str, Any]]) -> FoundSidecar:
    """Return the sidecar, or its problem."""
    arguments = None
    iteration = None
    with suppress(ContentError):  # reported by the code that uses the common state
        common = read_common()
        iteration = common.get("iteration")
        recorded = stored_arguments(common)
        job_arguments = megatron_arguments(recorded, stored.folder, None)
        arguments = job_arguments if recorded and job_arguments.is_complete else None
    return find_sidecar(stored, arguments, iteration)


def _local_models(checkpoint: CheckpointView) -> LocalModels:
    """Return the local parameters of the ranks that wrote a checkpoint."""
    weights = checkpoint.model.weights()
    stored = {}
    for name in weights.names():
        tensor = weights.logical_tensor(WEIGHT, name)
        if tensor is not None:
            stored[name] = StoredWeight(tensor, weight_grid(weights, name))
    job = checkpoint.job
    return LocalModels(stored, job.arguments(), job.layout, checkpoint.optimizer.has_expert_optimizer(), job.layers())


def _refuse_weights(name: str, folder: Path) -> NoReturn:
    raise UsageError(
        "--weights applies only to an optimizer in a distributed checkpoint", found=name,
        where=str(folder), hint="leave --weights out",
    )  # fmt: skip
