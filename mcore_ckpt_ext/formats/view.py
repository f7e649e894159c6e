"""An open checkpoint as a value made of replaceable parts: other names, other weights, no optimizer.

`dataclasses.replace` makes such a view; parts that are not replaced are shared with the original. Everything else is
derived from the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import UnknownNameError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.description import stored_arguments
from mcore_ckpt_ext.formats.lazy_tensor import TensorHandle, handle_of
from mcore_ckpt_ext.formats.parts import Files, Job, States, StoredOptimizer, StoredWeights, Weights, WholeModel
from mcore_ckpt_ext.formats.stored_parts import StoredPart
from mcore_ckpt_ext.formats.traits import FormatTraits
from mcore_ckpt_ext.formats.unread_state import UnreadState
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.grad_buffer import PackingRule
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.master_check import MasterCheck, master_check_of
from mcore_ckpt_ext.layout.packing_proposals import Proposal, propose_by_order, propose_by_sidecar
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder, known_orders
from mcore_ckpt_ext.layout.sidecar import Sidecar
from mcore_ckpt_ext.layout.weight_spec import WeightSpec
from mcore_ckpt_ext.model_space.anatomy import word_embeddings_in
from mcore_ckpt_ext.model_space.names import ShardedKey
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, KINDS, PARAM_REMAINDER, WEIGHT, LogicalTensor
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.plan import Copies, Derivation, Source, StoredSlice, derivation_of
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.transfer import Transfer


@dataclass(frozen=True, eq=False, repr=False)
class CheckpointView:
    """An open checkpoint.

    Attributes:
        format: the name of its format.
        format_reader: the reader of its format, which answers for the traits of the format.
        files: the location of its bytes.
        model: its weights.
        trained: its optimizer.
        job: the job that wrote it.
        states: extra states and random states.
        stored_parts: yields every stored part of every array and object, from metadata alone.
        unread_keys: returns all stored keys that this package does not read; True includes small pickled objects.
        messages: returns notes for a user who converts the given view of the checkpoint.
        ranks: the local parameters of the ranks that wrote it, under the names of the format's reader.
        for_legacy_files: returns the given view without the state that legacy files cannot contain.
        with_weights_of: opens it with the weights of another checkpoint, see `FormatReader.with_weights_of`.
        with_weights_of_a_job: opens it with the weights of a live job, see `FormatReader.with_weights_of_a_job`.
        base_model: the model that its adapters are for, if that is another checkpoint.
        adapters_by_rank: whether the rows of both projections of a gated `linear_fc1` in its adapters are ordered by
            rank, as in ms-swift.
        whole_model: the text part of a vision-language model; None for others.
        merged_from: the base and the adapters of a merged model, one if they are in the same folder; else empty.
        merge_notes: notes for the user of a merged model.
    """

    format: str
    format_reader: FormatTraits
    files: Files
    model: StoredWeights
    trained: StoredOptimizer
    job: Job
    states: States
    stored_parts: Callable[[], Iterator[StoredPart]]
    unread_keys: Callable[[bool], list[UnreadState]]
    messages: Callable[[CheckpointView], list[str]]
    ranks: Callable[[], LocalModels]
    for_legacy_files: Callable[[CheckpointView], CheckpointView]
    with_weights_of: Callable[[CheckpointView], CheckpointView]
    with_weights_of_a_job: Callable[[Mapping[str, WeightSpec]], CheckpointView]
    base_model: CheckpointView | None = None
    adapters_by_rank: bool = False
    whole_model: WholeModel | None = None
    merged_from: Sequence[CheckpointView] = ()
    merge_notes: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        """The `iter_XXXXXXX` or `release` folder."""
        return self.files.folder

    @property
    def reader(self) -> FolderReader:
        """Reads the folder's files."""
        return self.files.reader

    @property
    def transfer(self) -> Transfer:
        """Reads tensors from them."""
        return self.files.transfer

    def archives(self) -> Iterator[tuple[str, int, int]]:
        """Yield all torch archives of the checkpoint as (file, offset, length)."""
        return self.files.archives()

    @property
    def common(self) -> dict[str, Any]:
        """The common state: arguments, iteration, scheduler and the like."""
        return self.job.common()

    @property
    def args(self) -> dict[str, Any]:
        """Megatron's parsed arguments of the job that wrote the checkpoint, by name; dtypes as `Dtype`."""
        return stored_arguments(self.common)

    @property
    def arguments(self) -> JobArguments:
        """The known arguments of the job that wrote the checkpoint.

        Raises:
            UnreadableCheckpointError: an argument has an invalid value.
        """
        return self.job.arguments()

    @cached_property
    def layout(self) -> ParallelLayout:
        """The parallel layout of the job that wrote the checkpoint."""
        return ParallelLayout.from_arguments(self.arguments)

    @property
    def iteration(self) -> int:
        """The training iteration; the number in the folder's name if the checkpoint does not record one.

        Raises:
            UnreadableCheckpointError: the recorded iteration is not a valid number.
        """
        return self.job.iteration()

    @property
    def is_release(self) -> bool:
        """True if this is a model to start from (Megatron's `release` folder), not an iteration of a job."""
        return self.job.is_release

    def layers(self) -> list[list[range]] | None:
        """Return global decoder layers by `[pipeline rank][virtual stage]`.

        Returns:
            None if the format does not show them.
        """
        return self.job.layers()

    @property
    def sidecar(self) -> Sidecar | None:
        """The packing recorded in a sidecar; None if no readable one belongs to the checkpoint."""
        return self.job.sidecar().sidecar

    @property
    def sidecar_problem(self) -> str | None:
        """Why an existing sidecar cannot be read or is stale; None if it is used or missing."""
        return self.job.sidecar().problem

    def unbuildable(self, version: tuple[int, int]) -> str | None:
        """Return why a version of Megatron cannot build this model; None if it can."""
        return self.job.unbuildable(version)

    def orders(self) -> list[ParameterOrder]:
        """Evidence of the order in which parameters were registered."""
        return [*self.job.orders(), *known_orders(self.arguments)]

    @cached_property
    def models(self) -> LocalModels:
        """The local parameters of the ranks that wrote the checkpoint."""
        return self.ranks()

    def proposals(self, rules: Sequence[PackingRule], models: LocalModels) -> list[Proposal]:
        """Return candidate packings of the gradient buffers, the most reliable first.

        Args:
            rules: the packing rules that the job may have used.
            models: the parameters in the buffers.
        """
        recorded = [propose_by_sidecar(models, self.sidecar)] if self.sidecar else []
        return recorded + [propose_by_order(models, order, rule) for order in self.orders() for rule in rules]

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens in the vocabulary without padding; None if the format does not record it."""
        return self.job.vocabulary()

    @property
    def tokens(self) -> int | None:
        """Tokens of the vocabulary without padding, by the format or the arguments; None if neither has them."""
        return self.arguments.tokens if self.vocabulary is None else self.vocabulary

    @cached_property
    def vocabulary_rows(self) -> int | None:
        """Stored rows of the vocabulary with padding, which take precedence over the arguments.

        Release checkpoints may be unpadded; then the padded size is taken from the arguments.
        """
        recorded, table = self.arguments.padded_vocab_size, word_embeddings_in(self.names(WEIGHT))
        tensor = self.logical_tensor(WEIGHT, table) if table else None
        if tensor is None:
            return recorded
        rows, multiple = tensor.shape[0], self.arguments.make_vocab_size_divisible_by or 1
        return recorded if self.is_release and recorded == -(-rows // multiple) * multiple else rows

    def notices(self) -> list[str]:
        """Return notes for a user who converts the checkpoint."""
        return self.messages(self)

    def unread(self, *, objects: bool = True) -> list[UnreadState]:
        """Return stored keys that this package ignores; with `objects`, also those in small pickled objects."""
        return self.unread_keys(objects)

    @property
    def optimizer_format(self) -> str | None:
        """The name of the optimizer format, Megatron's where it has one; None without an optimizer."""
        return self.trained.format()

    @property
    def optimizer(self) -> OptimizerState:
        """The optimizer's state.

        Raises:
            UnsupportedCheckpointError: its format is not supported.
        """
        return self.trained.state()

    @property
    def has_expert_optimizer(self) -> bool:
        """True if experts have an optimizer of their own."""
        return self.trained.has_expert_optimizer()

    @property
    def weights_derived_from_masters(self) -> bool:
        """True if only masters are stored, so that weights are rounded masters."""
        return self.trained.weights_derived_from_masters

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups as each rank group stored them, with repetitions."""
        return self.trained.param_groups()

    def chained_optimizer_settings(self) -> list[dict[str, Any]]:
        """Return the settings of each chained optimizer, see `FormatReader.chained_optimizer_settings`."""
        return self.trained.chained_optimizer_settings()

    def grad_scaler(self) -> dict[str, Any] | None:
        """Return the state of the gradient scaler (fp16 only)."""
        return self.trained.grad_scaler()

    def extra_states(self) -> Mapping[str, Any]:
        """Return the modules' extra states (fp8 scales; empty in other precisions), by model-space name."""
        return self.states.extra()

    def random_states(self) -> Mapping[tuple[int, ...], Any]:
        """Return the state of the random generators by rank: (pipeline, tensor[, data])."""
        return self.states.random()

    def random_state_grid(self) -> tuple[int, ...] | None:
        """Return the grid of ranks if the state of the random generators is stored as one array, else None."""
        return self.states.random_grid()

    @property
    def weights(self) -> Weights:
        """The model's arrays."""
        return self.model.source()

    def sharded_keys(self) -> Mapping[str, ShardedKey]:
        """Return the `torch_dist` array of each name, and its index on the axes of layers and experts."""
        return self.model.sharded_keys()

    def kinds(self) -> tuple[str, ...]:
        """Return all kinds in the checkpoint."""
        return (WEIGHT, *(self.optimizer.kinds if self.optimizer_format else ()))

    def carried_kinds(self) -> tuple[str, ...]:
        """Return the kinds from which all others can be derived."""
        return (WEIGHT, *(self.optimizer.carried_kinds if self.optimizer_format else ()))

    def names(self, kind: str) -> list[str]:
        """Return the model-space names of one kind; none of a kind of Adam that the checkpoint lacks.

        Raises:
            UnknownNameError: there is no such kind.
        """
        if kind == WEIGHT:
            return self.weights.names()
        if kind in self.optimizer.kinds:
            return self.optimizer.names(kind)
        if kind in (*KINDS, PARAM_REMAINDER):
            return []
        raise UnknownNameError(
            "there is no such kind of tensor", found=kind, expected=" or ".join(self.kinds()), where=str(self.folder)
        )

    def _source(self, kind: str) -> Source:
        return self.weights if kind == WEIGHT else self.optimizer

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """Return the name, shape and dtype of a tensor; None if the checkpoint does not contain it."""
        return self._source(kind).logical_tensor(kind, name)

    def named_tensor(self, kind: str, name: str) -> LogicalTensor:
        """Return a tensor that is among the `names` of its kind.

        Raises:
            UnsupportedCheckpointError: the checkpoint does not contain it.
        """
        tensor = self.logical_tensor(kind, name)
        if tensor is None:
            raise UnsupportedCheckpointError(
                "the checkpoint lists a tensor that it does not contain", where=f"{kind} {name}"
            )
        return tensor

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """Return all slices that contain elements of a tensor."""
        return self._source(kind).stored(kind, name)

    def copies(self, kind: str, name: str) -> Copies:
        """Return the parts of a tensor, the copies of each part, and the slices that hold each copy."""
        return (self.weights if kind == WEIGHT else self.optimizer).copies(kind, name)

    def derivation(self, kind: str, name: str) -> Derivation | None:
        """Return the derivation of a tensor; None if it is stored."""
        return derivation_of(self._source(kind), kind, name)

    @cached_property
    def master_check(self) -> MasterCheck:
        """The master check for the masters that the checkpoint stores."""
        return master_check_of(self.arguments)

    def masters_are_derived(self, name: str) -> bool:
        """Return whether a parameter's masters and weights derive from each other and need no verification."""
        return self.weights_derived_from_masters or self.derivation(FP32_PARAM, name) is not None

    def tensor(self, kind: str, name: str) -> TensorHandle:
        """Return the handle of one tensor.

        Raises:
            TypeError: kind or name is no text.
            UnknownNameError: the checkpoint does not contain it.
        """
        return handle_of(self, kind, name)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.format}, iteration {self.iteration}, {self.folder}>"
