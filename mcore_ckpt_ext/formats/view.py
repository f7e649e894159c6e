"""A checkpoint as a value made of parts, of which each can be replaced: other names, other weights, no optimizer.

`dataclasses.replace` makes such a view; what is not replaced answers as before, because it is the same object.
Everything else follows from the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.description import ARGUMENTS
from mcore_ckpt_ext.formats.lazy_tensor import TensorHandle
from mcore_ckpt_ext.formats.messages import contradictions
from mcore_ckpt_ext.formats.parts import (
    Adapters,
    Files,
    Job,
    Merger,
    States,
    StoredOptimizer,
    StoredWeights,
    Weights,
    WholeModel,
)
from mcore_ckpt_ext.formats.unread_state import UnreadState
from mcore_ckpt_ext.formats.vocabulary import vocabulary_contradiction, vocabulary_rows
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.grad_buffer import PackingRule
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.master_check import Proof, proof_of
from mcore_ckpt_ext.layout.packing_candidates import Proposal, by_order, by_sidecar
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder, known_orders
from mcore_ckpt_ext.layout.sidecar import Sidecar
from mcore_ckpt_ext.model_space.names import ShardedKey
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT, LogicalTensor
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.array_location import RawArray
from mcore_ckpt_ext.planning.plan import Derivation, Source, StoredSlice, derivation_of
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.transfer import Transfer

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.reader import FormatReader


@dataclass(frozen=True, eq=False)
class CheckpointView:
    """An open checkpoint.

    Attributes:
        format: the name of its format.
        format_reader: what the format itself answers.
        files: where its bytes lie.
        model: its weights.
        trained: its optimizer.
        job: the job that wrote it.
        states: extra states and random states.
        unread_keys: every stored key that nothing here reads; given whether small pickled objects are looked at.
        messages: what a user should know who converts it, or a view of it, which is given.
        ranks: the local parameters of the ranks that wrote it, under the names of the format's reader.
        adapters: of a checkpoint with adapters alone, what is known of their model.
        whole_model: of a model that also sees images, which part is its text.
        merger: of a model with merged adapters, where it comes from.
    """

    format: str
    format_reader: FormatReader
    files: Files
    model: StoredWeights
    trained: StoredOptimizer
    job: Job
    states: States
    unread_keys: Callable[[bool], list[UnreadState]]
    messages: Callable[[CheckpointView], list[str]]
    ranks: Callable[[], LocalModels]
    adapters: Adapters = field(default_factory=Adapters)
    whole_model: WholeModel | None = None
    merger: Merger | None = None

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
        """Every archive of the checkpoint: (file, offset, length)."""
        return self.files.archives()

    def checked_arrays(self) -> Iterator[RawArray]:
        """Every array that lies bare in a file and whose checksum is known; only some formats have them."""
        return self.files.checked_arrays()

    def auxiliary_files(self) -> dict[str, bytes]:
        """Small files that belong to the model, such as its tokenizer, by name."""
        return self.files.auxiliary_files()

    @property
    def auxiliary_files_below(self) -> str:
        """The folder within the checkpoint that holds them; empty for the checkpoint itself."""
        return self.files.auxiliary_files_below

    @property
    def common(self) -> dict[str, Any]:
        """The common state: arguments, iteration, scheduler and the like."""
        return self.job.common()

    @property
    def args(self) -> dict[str, Any]:
        """Megatron's parsed arguments of the job that wrote the checkpoint, by name; dtypes as `Dtype`."""
        return dict(vars(self.common[ARGUMENTS])) if ARGUMENTS in self.common else {}

    @property
    def arguments(self) -> JobArguments:
        """The known arguments of the job that wrote the checkpoint.

        Raises:
            UnreadableCheckpointError: one has a value that it cannot have.
        """
        return self.job.arguments()

    @cached_property
    def layout(self) -> ParallelLayout:
        """The parallel layout of the job that wrote the checkpoint."""
        return ParallelLayout.from_arguments(self.arguments)

    @property
    def iteration(self) -> int:
        """The training iteration; that of its folder, where the checkpoint itself does not say it.

        Raises:
            UnreadableCheckpointError: it says something else.
        """
        return self.job.iteration()

    @property
    def released(self) -> bool:
        """Whether the checkpoint is a model to start from (Megatron's `release` folder), not an iteration of a job."""
        return self.job.released

    def layers(self) -> list[list[range]] | None:
        """Global decoder layers by `[pipeline rank][virtual stage]`, where the format itself shows them."""
        return self.job.layers()

    @property
    def sidecar(self) -> Sidecar | None:
        """The packing recorded beside the checkpoint, if there is a readable one that belongs to it."""
        return self.job.sidecar().sidecar

    @property
    def sidecar_problem(self) -> str | None:
        """Why the sidecar that is there cannot be read, is none, or is stale."""
        return self.job.sidecar().problem

    def unbuildable(self, version: tuple[int, int]) -> str | None:
        """Why a version of Megatron has no such model; None where it has."""
        return self.job.unbuildable(version)

    def orders(self) -> list[ParameterOrder]:
        """Evidence of the order in which parameters were registered."""
        return [*self.job.orders(), *known_orders(self.arguments)]

    @cached_property
    def models(self) -> LocalModels:
        """The local parameters of the ranks that wrote the checkpoint."""
        return self.ranks()

    def proposals(self, rules: Sequence[PackingRule], models: LocalModels) -> list[Proposal]:
        """Proposals of the gradient buffers' packing, the one to believe first at the front.

        Args:
            rules: the packing rules that may have been followed.
            models: the parameters that the buffers hold.
        """
        recorded = [by_sidecar(models, self.sidecar)] if self.sidecar else []
        return recorded + [by_order(models, order, rule) for order in self.orders() for rule in rules]

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens in the vocabulary without padding, where the format itself gives it."""
        return self.job.vocabulary()

    @property
    def tokens(self) -> int | None:
        """Tokens of the vocabulary without padding, by the format or by the arguments; None where neither says."""
        return self.arguments.tokens if self.vocabulary is None else self.vocabulary

    @cached_property
    def vocabulary_rows(self) -> int | None:
        """Rows of the vocabulary, padding included: as they are stored, whatever the arguments say of them.

        A model to begin with may lack its padding; then it is what its arguments say that a job makes of it.
        """
        return vocabulary_rows(self)

    @property
    def vocabulary_contradiction(self) -> str | None:
        """A contradiction between the arguments and the vocabulary's rows; None if they agree."""
        return vocabulary_contradiction(self)

    @cached_property
    def contradictions(self) -> list[str]:
        """Contradictions between metadata and stored content."""
        return contradictions(self)

    def notices(self) -> list[str]:
        """Notes for a user who converts the checkpoint."""
        return self.messages(self)

    def unread(self, *, objects: bool = True) -> list[UnreadState]:
        """Every stored key that nothing here reads, from metadata; with `objects` also from small pickled objects."""
        return self.unread_keys(objects)

    @property
    def optimizer_format(self) -> str | None:
        """The name of the stored optimizer's encoding, Megatron's own where it has one; None without an optimizer."""
        return self.trained.format()

    @property
    def optimizer(self) -> OptimizerState:
        """The optimizer's state.

        Raises:
            UnsupportedCheckpointError: it is in a format that is not read.
        """
        return self.trained.state()

    @property
    def has_expert_optimizer(self) -> bool:
        """Whether experts have an optimizer of their own."""
        return self.trained.has_expert_optimizer()

    @property
    def weights_derived_from_masters(self) -> bool:
        """Whether masters alone are stored, and the weights are their roundings."""
        return self.trained.weights_derived_from_masters

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups as each rank group stored them, with repetitions."""
        return self.trained.param_groups()

    def chain(self) -> list[dict[str, Any]]:
        """The settings of each chained optimizer, see `FormatReader.chain`."""
        return self.trained.chain()

    def grad_scaler(self) -> dict[str, Any] | None:
        """The state of the gradient scaler (fp16 only)."""
        return self.trained.grad_scaler()

    def extra_states(self) -> Mapping[str, Any]:
        """The modules' extra states (fp8 scales; nothing in other precisions), by model-space name."""
        return self.states.extra()

    def random_states(self) -> Mapping[tuple[int, ...], Any]:
        """The state of the random generators by rank: (pipeline, tensor[, data])."""
        return self.states.random()

    def random_state_grid(self) -> tuple[int, ...] | None:
        """Ranks for which the state of the random generators is stored as one array; None where it is not."""
        return self.states.random_grid()

    @property
    def weights(self) -> Weights:
        """The model's arrays."""
        return self.model.source()

    def sharded_keys(self) -> Mapping[str, ShardedKey]:
        """The array of each name in `torch_dist`, and its index on the axes that count layers and experts."""
        return self.model.sharded_keys()

    def kinds(self) -> tuple[str, ...]:
        """All kinds that the checkpoint holds."""
        return (WEIGHT, *(self.optimizer.kinds if self.optimizer_format else ()))

    def carried_kinds(self) -> tuple[str, ...]:
        """The kinds that together hold everything, without those from which others are derived."""
        return (WEIGHT, *(self.optimizer.carried_kinds if self.optimizer_format else ()))

    def names(self, kind: str) -> list[str]:
        """Model-space names of one kind."""
        if kind == WEIGHT:
            return self.weights.names()
        return self.optimizer.names(kind) if kind in self.optimizer.kinds else []

    def _source(self, kind: str) -> Source:
        return self.weights if kind == WEIGHT else self.optimizer

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """The tensor as the checkpoint knows it; None where it has none of that kind and name."""
        return self._source(kind).logical_tensor(kind, name)

    def named_tensor(self, kind: str, name: str) -> LogicalTensor:
        """A tensor that is among the `names` of its kind.

        Raises:
            UnsupportedCheckpointError: the checkpoint does not know it all the same.
        """
        tensor = self.logical_tensor(kind, name)
        if tensor is None:
            raise UnsupportedCheckpointError(
                "the checkpoint lists a tensor that it does not contain", where=f"{kind} {name}"
            )
        return tensor

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """All slices that hold elements of a tensor."""
        return self._source(kind).stored(kind, name)

    def derivation(self, kind: str, name: str) -> Derivation | None:
        """How a tensor is derived; None where it is stored."""
        return derivation_of(self._source(kind), kind, name)

    @cached_property
    def proof(self) -> Proof:
        """How the masters that the checkpoint stores are proven."""
        return proof_of(self.arguments)

    def masters_are_derived(self, name: str) -> bool:
        """Whether a parameter's masters and weights are derived from each other, which leaves nothing to prove."""
        return self.weights_derived_from_masters or self.derivation(FP32_PARAM, name) is not None

    def tensor(self, kind: str, name: str) -> TensorHandle:
        """The handle of one tensor.

        Raises:
            KeyError: the checkpoint has none of that kind and name.
        """
        if (logical := self.logical_tensor(kind, name)) is None:
            raise KeyError(f"no {kind} {name} in {self.folder}")
        return TensorHandle(self, kind, logical)
