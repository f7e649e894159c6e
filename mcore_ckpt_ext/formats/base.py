"""The interface of an open checkpoint, the same for every format, and what all formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError, UnsupportedCheckpointError, shown
from mcore_ckpt_ext.formats.description import ARGUMENTS, stated_by_megatron
from mcore_ckpt_ext.formats.handle import TensorHandle
from mcore_ckpt_ext.formats.huggingface_folder import TOKENIZER_FOLDER, companions
from mcore_ckpt_ext.formats.messages import contradictions, general_notices, vocabulary_contradiction
from mcore_ckpt_ext.formats.parts import Weights
from mcore_ckpt_ext.formats.sidecar_file import FoundSidecar, find_sidecar
from mcore_ckpt_ext.formats.stacking import sharded_keys
from mcore_ckpt_ext.formats.unread import Unread
from mcore_ckpt_ext.layout.grad_buffer import PackingRule
from mcore_ckpt_ext.layout.local_model import LocalModels, StoredWeight
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder, known_orders
from mcore_ckpt_ext.layout.proof import Proof, proof_of
from mcore_ckpt_ext.layout.proposals import Proposal, by_order, by_sidecar
from mcore_ckpt_ext.layout.sidecar import Sidecar
from mcore_ckpt_ext.model_space.anatomy import word_embeddings_in
from mcore_ckpt_ext.model_space.names import ShardedKey
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT, LogicalTensor
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.extents import RawArray
from mcore_ckpt_ext.planning.plan import Derivation, Source, StoredSlice
from mcore_ckpt_ext.storage.remote import folder_reader
from mcore_ckpt_ext.storage.runs import RELEASE, iteration_number
from mcore_ckpt_ext.transfer import Transfer

_MOST_ITERATIONS = 1 << 40


@dataclass(frozen=True)
class Adapters:
    """What is known of adapters alone.

    Attributes:
        model: the checkpoint that describes their model; None where they do so themselves.
        by_rank: rows of both projections of a gated `linear_fc1` lie rank by rank, as ms-swift stores them.
    """

    model: Checkpoint | None = None
    by_rank: bool = False


@dataclass(frozen=True)
class WholeModel:
    """Of a model that also sees images, under the names that its text would have alone.

    Attributes:
        kind: the `model_type` of the whole.
        text: the names of its text.
    """

    kind: str
    text: frozenset[str]


@dataclass(frozen=True)
class Merger:
    """Where a model with merged adapters comes from.

    Attributes:
        sources: the base and the adapters; one where they lie beside each other.
        messages: what a user of the merged model should know.
    """

    sources: Sequence[Checkpoint]
    messages: Sequence[str]


class Checkpoint(ABC):
    """One iteration folder, seen in model space. Nothing but metadata is read until a tensor is asked for."""

    format: str
    rounds_weights = False  # whether masters alone are stored, and the weights are their roundings
    adapters = Adapters()
    whole_model: WholeModel | None = None
    merger: Merger | None = None

    def __init__(self, folder: Path, witnesses: Sequence[ParameterOrder] = ()) -> None:
        """Open a folder.

        Args:
            folder: the `iter_XXXXXXX` or `release` folder.
            witnesses: parameter orders to try after the sidecar and before the known ones.

        Raises:
            UnreadableCheckpointError: metadata is missing or damaged.
            UnsupportedCheckpointError: its kind is not read.
        """
        self.folder = folder
        self.reader = folder_reader(folder)
        self.transfer = Transfer(self.reader)
        self._witnesses = tuple(witnesses)

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
        """The name of the stored optimizer's encoding, Megatron's own where it has one; None without an optimizer."""

    @property
    def optimizer_format(self) -> str | None:
        """The same, but None where the optimizer is left out."""
        return self.stored_optimizer_format

    def unread(self, *, objects: bool = True) -> list[Unread]:
        """Every stored key that nothing here reads, from metadata; with `objects` also from small pickled objects."""
        return []

    @property
    @abstractmethod
    def optimizer(self) -> OptimizerState:
        """The optimizer's state.

        Raises:
            UnsupportedCheckpointError: it is in a format that is not read.
        """

    @property
    @abstractmethod
    def experts_apart(self) -> bool:
        """Whether experts have an optimizer of their own."""

    @abstractmethod
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups as each rank group stored them, with repetitions."""

    def chain(self) -> list[dict[str, Any]]:
        """The settings of each chained optimizer, as the common state of `torch_dist` has them.

        Groups without their parameters, and the step where no group has it. Empty where DistributedOptimizers hold
        everything, or can: their groups follow from `param_groups`.
        """
        return []

    @abstractmethod
    def grad_scaler(self) -> dict[str, Any] | None:
        """The state of the gradient scaler (fp16 only)."""

    @abstractmethod
    def extra_states(self) -> Mapping[str, Any]:
        """The modules' extra states (fp8 scales; nothing in other precisions), by model-space name."""

    @abstractmethod
    def random_states(self) -> Mapping[tuple[int, ...], Any]:
        """The state of the random generators by rank: (pipeline, tensor[, data])."""

    @abstractmethod
    def archives(self) -> Iterator[tuple[str, int, int]]:
        """Every archive of the checkpoint: (file, offset, length)."""

    def checked_arrays(self) -> Iterator[RawArray]:
        """Every array that lies bare in a file and whose checksum is known; only some formats have them."""
        return iter(())

    @property
    def args(self) -> dict[str, Any]:
        """Megatron's parsed arguments of the job that wrote the checkpoint, by name."""
        return dict(vars(self.common[ARGUMENTS])) if ARGUMENTS in self.common else {}

    @cached_property
    def arguments(self) -> JobArguments:
        """What is known of the arguments of that job.

        Raises:
            UnreadableCheckpointError: one has a value that it cannot have.
        """
        return stated_by_megatron(self.args, self.folder, self.sidecar)

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
        stated = self.common.get("iteration", iteration_number(self.folder) or 0)
        if type(stated) is not int or not 0 <= stated < _MOST_ITERATIONS:
            raise UnreadableCheckpointError(
                "the checkpoint says of its iteration what no iteration is", found=shown(stated),
                expected="a whole number", where=str(self.folder), helps="its common state was edited: use another one",
            )  # fmt: skip
        return stated

    @property
    def released(self) -> bool:
        """Whether it is a model to start from, not an iteration of a job (Megatron's `release` folder)."""
        return self.folder.name == RELEASE

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens in the vocabulary without padding, where the format itself gives it."""
        return None

    @property
    def tokens(self) -> int | None:
        """Tokens of the vocabulary without padding, by the format or by the arguments; None where neither says."""
        return self.arguments.tokens if self.vocabulary is None else self.vocabulary

    @cached_property
    def vocabulary_rows(self) -> int | None:
        """Rows of the vocabulary, padding included: as they are stored, whatever the arguments say of them.

        A model to begin with may lack its padding; then it is what its arguments say that a job makes of it.
        """
        stated, table = self.arguments.padded_vocab_size, word_embeddings_in(self.names(WEIGHT))
        tensor = self.logical_tensor(WEIGHT, table) if table else None
        if tensor is None:
            return stated
        rows, multiple = tensor.shape[0], self.arguments.make_vocab_size_divisible_by or 1
        return stated if self.released and stated == -(-rows // multiple) * multiple else rows

    @property
    def vocabulary_contradiction(self) -> str | None:
        """What the arguments say of the vocabulary's rows, and is not so; None where they agree."""
        return vocabulary_contradiction(self)

    @cached_property
    def contradictions(self) -> list[str]:
        """What the arguments, and the folder's name, say of the content, and is not so."""
        return contradictions(self)

    def notices(self) -> list[str]:
        """What a user who converts it should know."""
        return self.notices_of(self)

    def notices_of(self, view: Checkpoint) -> list[str]:
        """What a user should know who converts a view of it: itself, or itself with some parts replaced."""
        return general_notices(view)

    def companions(self) -> dict[str, bytes]:
        """Small files that belong to the model, such as its tokenizer, by name."""
        return companions(self.folder, self.companions_below)

    @property
    def companions_below(self) -> str:
        """The folder within the checkpoint that holds them; empty for the checkpoint itself."""
        return TOKENIZER_FOLDER

    def unbuildable(self, version: tuple[int, int]) -> str | None:
        """Why a version of Megatron has no such model; None where it has."""
        return None

    @cached_property
    def models(self) -> LocalModels:
        """The local parameters of the ranks that wrote the checkpoint."""
        stored = {}
        for name in self.weights.names():
            tensor = self.weights.logical_tensor(WEIGHT, name)
            if tensor is not None:
                stored[name] = StoredWeight(tensor, self._grid(name))
        return LocalModels(stored, self.arguments, self.layout, self.experts_apart, self.layers())

    def _grid(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The distinct offsets of the stored parts of a weight, axis by axis."""
        return grid_of(stored.slice.regions[0].offsets for stored in self.weights.stored(WEIGHT, name))

    def layers(self) -> list[list[range]] | None:
        """Global decoder layers by `[pipeline rank][virtual stage]`, where the format itself shows them."""
        return None

    def sharded_keys(self) -> Mapping[str, ShardedKey]:
        """The array of each name in `torch_dist`, and its index on the axes that count layers and experts."""
        return sharded_keys(self.weights.names(), self.arguments)

    def random_state_grid(self) -> tuple[int, ...] | None:
        """Ranks for which the state of the random generators is stored as one array; None where it is not."""
        return None

    def witnessed_orders(self) -> Sequence[ParameterOrder]:
        """Evidence of the order in which the parameters of this very model were registered."""
        return self._witnesses

    def orders(self) -> list[ParameterOrder]:
        """The witnesses of the order in which parameters were registered."""
        return [*self.witnessed_orders(), *known_orders(self.arguments)]

    @property
    def shows_registration(self) -> bool:
        """Whether its buffers hold the parameters as a job with its arguments registers them."""
        return True

    def proposals(self, rules: Sequence[PackingRule], models: LocalModels) -> list[Proposal]:
        """The witnesses of the gradient buffers' packing, the one to believe first at the front.

        Args:
            rules: the packing rules that may have been followed.
            models: the parameters that the buffers hold.
        """
        recorded = [by_sidecar(models, self.sidecar)] if self.sidecar else []
        return recorded + [by_order(models, order, rule) for order in self.orders() for rule in rules]

    @property
    def sidecar(self) -> Sidecar | None:
        """The packing recorded beside the checkpoint, if there is a readable one that belongs to it."""
        return self._found_sidecar.sidecar

    @property
    def sidecar_problem(self) -> str | None:
        """Why the sidecar that is there cannot be read, is none, or is stale."""
        return self._found_sidecar.problem

    @cached_property
    def _found_sidecar(self) -> FoundSidecar:
        stated, iteration = None, None
        with suppress(CheckpointError):  # whoever uses the common state reports what is wrong with it
            iteration = self.common.get("iteration")
            own = stated_by_megatron(self.args, self.folder, None)
            stated = own if self.args and own.tells_all else None
        return find_sidecar(self.folder, stated, iteration)

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

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """The tensor as the checkpoint knows it; None where it has none of that kind and name."""
        source: Source = self.weights if kind == WEIGHT else self.optimizer
        return source.logical_tensor(kind, name)

    def named_tensor(self, kind: str, name: str) -> LogicalTensor:
        """A tensor that is among the `names` of its kind.

        Raises:
            UnsupportedCheckpointError: the checkpoint does not know it all the same.
        """
        tensor = self.logical_tensor(kind, name)
        if tensor is None:
            raise UnsupportedCheckpointError("the checkpoint lacks a tensor that it names", where=f"{kind} {name}")
        return tensor

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """All slices that hold elements of a tensor."""
        source: Source = self.weights if kind == WEIGHT else self.optimizer
        return source.stored(kind, name)

    def derivation(self, kind: str, name: str) -> Derivation | None:
        """How a tensor is derived; None where it is stored."""
        return None if kind == WEIGHT else self.optimizer.derivation(kind, name)

    @cached_property
    def proof(self) -> Proof:
        """How the masters that the checkpoint stores are proven."""
        return proof_of(self.arguments)

    def follow_from_weights(self, name: str) -> bool:
        """Whether a parameter's masters and weights are derived from each other, which leaves nothing to prove."""
        return self.rounds_weights or self.derivation(FP32_PARAM, name) is not None

    def tensor(self, kind: str, name: str) -> TensorHandle:
        """The handle of one tensor.

        Raises:
            KeyError: the checkpoint has none of that kind and name.
        """
        if (logical := self.logical_tensor(kind, name)) is None:
            raise KeyError(f"no {kind} {name} in {self.folder}")
        return TensorHandle(self, kind, logical)


def grid_of(offsets: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The distinct offsets of parts, axis by axis."""
    return tuple(tuple(sorted(set(axis))) for axis in zip(*offsets, strict=True))
