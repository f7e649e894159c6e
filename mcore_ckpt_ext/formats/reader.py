"""Base class of the readers of all formats; `CheckpointView` is built from its members."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import ContentError, UnreadableCheckpointError, UsageError, format_value
from mcore_ckpt_ext.formats.auxiliary_files import TOKENIZER_FOLDER, auxiliary_files
from mcore_ckpt_ext.formats.description import megatron_arguments, stored_arguments
from mcore_ckpt_ext.formats.grid import weight_grid
from mcore_ckpt_ext.formats.messages import general_notices
from mcore_ckpt_ext.formats.open_options import DEFAULT_OPTIONS, OpenOptions
from mcore_ckpt_ext.formats.parts import Files, Job, States, StoredOptimizer, StoredWeights, Weights, lazy
from mcore_ckpt_ext.formats.sidecar_file import FoundSidecar, find_sidecar
from mcore_ckpt_ext.formats.stacking import sharded_keys
from mcore_ckpt_ext.formats.stored_parts import StoredPart
from mcore_ckpt_ext.formats.traits import FormatTraits
from mcore_ckpt_ext.formats.unread_state import UnreadState
from mcore_ckpt_ext.formats.view import CheckpointView, OpenedFormat
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.local_model import LocalModels, StoredWeight
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.layout.weight_spec import WeightSpec
from mcore_ckpt_ext.model_space.names import ShardedKey
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.array_location import RawArray
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.storage.checkpoint_dirs import RELEASE, iteration_number
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from mcore_ckpt_ext.storage.remote import folder_reader
from mcore_ckpt_ext.transfer import Transfer

_MOST_ITERATIONS = 1 << 40


class FormatReader(FormatTraits, ABC):
    """Reads one iteration folder; tensors are read only on request.

    Attributes:
        format: the name of the format.
        folder: the `iter_XXXXXXX` or `release` folder.
        options: the options with which it was opened.
        folder_index: the index of the folder, which is read once.
        weights_derived_from_masters: whether only masters are stored, so that weights are rounded masters.
    """

    format: str
    weights_derived_from_masters = False

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
        self.reader = folder_reader(folder)
        self.transfer = Transfer(self.reader)

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
    def view(self) -> CheckpointView:
        """The checkpoint."""
        return CheckpointView(
            format=OpenedFormat(
                self.format,
                reader=self,
                notices=self.notices_of,
                limit_to_legacy=self.limit_to_legacy,
                with_weights_of=self.with_weights_of,
                with_weights_of_a_job=self.with_weights_of_a_job,
            ),
            files=Files(
                self.folder,
                self.reader,
                self.transfer,
                archives=self.archives,
                checked_arrays=self.checked_arrays,
                stored_parts=self.stored_parts,
                unread=self.unread,
                auxiliary_files=self.auxiliary_files,
                auxiliary_files_below=self.auxiliary_files_below,
            ),
            model=StoredWeights(lambda: self.weights, self.sharded_keys),
            optimizer=StoredOptimizer(
                format=lambda: self.stored_optimizer_format,
                state=lambda: self.optimizer,
                has_expert_optimizer=lambda: self.has_expert_optimizer,
                param_groups=self.param_groups,
                chained_optimizer_settings=self.chained_optimizer_settings,
                grad_scaler=self.grad_scaler,
                weights_derived_from_masters=self.weights_derived_from_masters,
            ),
            job=Job(
                common=lambda: self.common,
                arguments=lambda: self.arguments,
                iteration=lambda: self.iteration,
                is_release=self.is_release,
                vocabulary=lambda: self.vocabulary,
                layers=self.layers,
                models=lazy(self.models),
                observed_orders=self.parameter_orders,
                found_sidecar=lambda: self.found_sidecar,
                unbuildable=self.unbuildable,
            ),
            states=States(self.extra_states, self.random_states, self.random_state_grid),
        )

    @property
    @abstractmethod
    def common(self) -> dict[str, Any]:
        """The common state: arguments, iteration, scheduler and the like."""

    @property
    @abstractmethod
    def weights(self) -> Weights:
        """The model's arrays."""

    @property
    @abstractmethod
    def stored_optimizer_format(self) -> str | None:
        """The name of the optimizer format, Megatron's where it has one; None without an optimizer."""

    @property
    @abstractmethod
    def optimizer(self) -> OptimizerState:
        """The optimizer's state.

        Raises:
            UnsupportedCheckpointError: its format is not supported.
        """

    @property
    @abstractmethod
    def has_expert_optimizer(self) -> bool:
        """True if experts have an optimizer of their own."""

    @abstractmethod
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups as each rank group stored them, with repetitions."""

    def chained_optimizer_settings(self) -> list[dict[str, Any]]:
        """Return the settings of each chained optimizer, as the common state of `torch_dist` has them.

        They are groups without parameters, with the step added if no group has it.

        Returns:
            The settings; empty if all of them are or can become DistributedOptimizers, which need no settings.
        """
        return []

    @abstractmethod
    def grad_scaler(self) -> dict[str, Any] | None:
        """Return the state of the gradient scaler (fp16 only)."""

    @abstractmethod
    def extra_states(self) -> Mapping[str, Any]:
        """Return the modules' extra states (fp8 scales; empty in other precisions), by model-space name."""

    @abstractmethod
    def random_states(self) -> Mapping[tuple[int, ...], Any]:
        """Return the state of the random generators by rank: (pipeline, tensor[, data])."""

    def random_state_grid(self) -> tuple[int, ...] | None:
        """Return the grid of ranks if the state of the random generators is stored as one array, else None."""
        return None

    @abstractmethod
    def archives(self) -> Iterator[tuple[str, int, int]]:
        """Yield all torch archives of the checkpoint as (file, offset, length)."""

    def checked_arrays(self) -> Iterator[RawArray]:
        """Yield arrays stored outside archives that have a known checksum; only some formats have them."""
        return iter(())

    def unread(self, *, objects: bool = True) -> list[UnreadState]:
        """Return stored keys that this package ignores; with `objects`, also those in small pickled objects."""
        return []

    @cached_property
    def arguments(self) -> JobArguments:
        """The known arguments of the job that wrote the checkpoint.

        Raises:
            UnreadableCheckpointError: an argument has an invalid value.
        """
        return megatron_arguments(stored_arguments(self.common), self.folder, self.found_sidecar.sidecar)

    @property
    def iteration(self) -> int:
        """The training iteration; the number in the folder's name if the checkpoint does not record one.

        Raises:
            UnreadableCheckpointError: the recorded iteration is not a valid number.
        """
        number = self.common.get("iteration", iteration_number(self.folder) or 0)
        if type(number) is not int or not 0 <= number < _MOST_ITERATIONS:
            raise UnreadableCheckpointError(
                "invalid iteration number in the checkpoint", found=format_value(number),
                expected="a whole number", where=str(self.folder), hint="its common state was edited: "
                    "use another iteration",
            )  # fmt: skip
        return number

    @property
    def is_release(self) -> bool:
        """True if this is a model to start from (Megatron's `release` folder), not an iteration of a job."""
        return self.folder.name == RELEASE

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens in the vocabulary without padding; None if the format does not record it."""
        return None

    def notices_of(self, view: CheckpointView) -> list[str]:
        """Return notes for a user who converts a view of this checkpoint."""
        return general_notices(view)

    def auxiliary_files(self) -> dict[str, bytes]:
        """Read small files that belong to the model, such as its tokenizer, by name."""
        return auxiliary_files(self.folder, self.auxiliary_files_below)

    @property
    def auxiliary_files_below(self) -> str:
        """The subfolder of the checkpoint that contains the auxiliary files; empty for the checkpoint itself."""
        return TOKENIZER_FOLDER

    def models(self) -> LocalModels:
        """Return the local parameters of the ranks that wrote the checkpoint."""
        weights = self.weights
        stored = {}
        for name in weights.names():
            tensor = weights.logical_tensor(WEIGHT, name)
            if tensor is not None:
                stored[name] = StoredWeight(tensor, weight_grid(weights, name))
        return LocalModels(stored, self.arguments, self.view.job.layout, self.has_expert_optimizer, self.layers())

    def layers(self) -> list[list[range]] | None:
        """Return global decoder layers by `[pipeline rank][virtual stage]`.

        Returns:
            None if the format does not show them.
        """
        return None

    def sharded_keys(self) -> Mapping[str, ShardedKey]:
        """Return the `torch_dist` array of each name, and its index on the axes of layers and experts."""
        return sharded_keys(self.weights.names(), self.arguments)

    def parameter_orders(self) -> Sequence[ParameterOrder]:
        """Return evidence of the order in which this model's parameters were registered."""
        return self.options.order_sources

    def stored_parts(self) -> Iterator[StoredPart]:
        """Yield every stored part of every array and object, from metadata alone."""
        return self.parts_of(self.view.kinds())

    def parts_of(self, kinds: Iterable[str]) -> Iterator[StoredPart]:
        """Yield every slice of every tensor of some kinds."""
        for kind in kinds:
            for name in self.view.names(kind):
                for stored in self.view.stored_slices(kind, name):
                    nbytes = stored.slice.numel * ITEM_SIZE[stored.extent.dtype]
                    yield StoredPart(stored.extent.file, kind, name, nbytes)

    def limit_to_legacy(self, view: CheckpointView) -> CheckpointView:
        """Return a view of this checkpoint without the state that legacy files cannot contain."""
        return view

    def with_weights_of(self, source: CheckpointView) -> CheckpointView:
        """Open the checkpoint, an optimizer stored without weights, with the weights of another one.

        Args:
            source: the checkpoint with the weights.

        Raises:
            UsageError: this checkpoint has weights, or the other one has none.
            CheckpointError: the weights do not belong to this optimizer, or nothing can verify that they do.
        """
        raise UsageError(
            "--weights applies only to an optimizer in a distributed checkpoint", found=self.format,
            where=str(self.folder), hint="leave --weights out",
        )  # fmt: skip

    def with_weights_of_a_job(self, weights: Mapping[str, WeightSpec]) -> CheckpointView:
        """Open the checkpoint, an optimizer stored without weights, with the weights of a live job.

        Args:
            weights: the specification of each weight, by model-space name.
        """
        return self.view

    @cached_property
    def found_sidecar(self) -> FoundSidecar:
        """The sidecar, or its problem."""
        arguments = None
        iteration = None
        with suppress(ContentError):  # reported by the code that uses the common state
            iteration = self.common.get("iteration")
            stored = stored_arguments(self.common)
            job_arguments = megatron_arguments(stored, self.folder, None)
            arguments = job_arguments if stored and job_arguments.is_complete else None
        return find_sidecar(self.folder_index, arguments, iteration)
