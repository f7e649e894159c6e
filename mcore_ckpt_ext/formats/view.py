"""A checkpoint as a value made of parts, of which each can be replaced: other names, other weights, no optimizer.

`dataclasses.replace` makes such a view; what is not replaced answers as before, because it is the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import ne
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.formats.base import Adapters, Checkpoint, Merger, WholeModel
from mcore_ckpt_ext.formats.parts import Files, Job, States, StoredOptimizer, StoredWeights, Weights, lazy
from mcore_ckpt_ext.formats.renamed import NameMap, RenamedOrder, RenamedState, RenamedWeights
from mcore_ckpt_ext.formats.unread import Unread
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder, known_orders
from mcore_ckpt_ext.layout.sidecar import Sidecar
from mcore_ckpt_ext.model_space.names import ShardedKey, spelled_as_in
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.extents import RawArray
from mcore_ckpt_ext.planning.plan import Derivation, derivation_of


@dataclass(frozen=True, eq=False)
class CheckpointView(Checkpoint):
    """An open checkpoint.

    Attributes:
        format: the name of its format.
        files: where its bytes lie.
        model: its weights.
        trained: its optimizer.
        job: the job that wrote it.
        states: extra states and random states.
        unread_keys: every stored key that nothing here reads; given whether small pickled objects are looked at.
        messages: what a user should know who converts it, or a view of it, which is given.
        adapters: of a checkpoint with adapters alone, what is known of their model.
        whole: of a model that also sees images, which part is its text.
        merger: of a model with merged adapters, where it comes from.
    """

    format: str
    files: Files
    model: StoredWeights
    trained: StoredOptimizer
    job: Job
    states: States
    unread_keys: Callable[[bool], list[Unread]]
    messages: Callable[[Checkpoint], list[str]]
    adapters: Adapters = Adapters()
    whole_model: WholeModel | None = None
    merger: Merger | None = None

    def __post_init__(self) -> None:
        """Offer the parts of the files under the names that all checkpoints have."""
        own = self.files
        vars(self).update(folder=own.folder, reader=own.reader, transfer=own.transfer)
        vars(self).update(rounds_weights=self.trained.rounds_weights)

    @property
    @override
    def common(self) -> dict[str, Any]:
        return self.job.common()

    @property
    @override
    def arguments(self) -> JobArguments:
        return self.job.arguments()

    @property
    @override
    def iteration(self) -> int:
        return self.job.iteration()

    @property
    @override
    def released(self) -> bool:
        return self.job.released

    @property
    @override
    def vocabulary(self) -> int | None:
        return self.job.vocabulary()

    @override
    def layers(self) -> list[list[range]] | None:
        return self.job.layers()

    @override
    def orders(self) -> list[ParameterOrder]:
        return [*self.job.orders(), *known_orders(self.arguments)]

    @property
    @override
    def sidecar(self) -> Sidecar | None:
        return self.job.sidecar()[0]

    @property
    @override
    def sidecar_problem(self) -> str | None:
        return self.job.sidecar()[1]

    @override
    def unbuildable(self, version: tuple[int, int]) -> str | None:
        return self.job.unbuildable(version)

    @property
    @override
    def weights(self) -> Weights:
        return self.model.source()

    @override
    def sharded_keys(self) -> Mapping[str, ShardedKey]:
        return self.model.sharded_keys()

    @override
    def derivation(self, kind: str, name: str) -> Derivation | None:
        return derivation_of(self.weights if kind == WEIGHT else self.optimizer, kind, name)

    @property
    @override
    def stored_optimizer_format(self) -> str | None:
        return self.trained.format()

    @property
    @override
    def optimizer_format(self) -> str | None:
        return self.trained.format()

    @property
    @override
    def optimizer(self) -> OptimizerState:
        return self.trained.state()

    @property
    @override
    def experts_apart(self) -> bool:
        return self.trained.experts_apart()

    @property
    @override
    def shows_registration(self) -> bool:
        return self.trained.shows_registration

    @override
    def param_groups(self) -> list[dict[str, Any]]:
        return self.trained.param_groups()

    @override
    def chain(self) -> list[dict[str, Any]]:
        return self.trained.chain()

    @override
    def grad_scaler(self) -> dict[str, Any] | None:
        return self.trained.grad_scaler()

    @override
    def extra_states(self) -> Mapping[str, Any]:
        return self.states.extra()

    @override
    def random_states(self) -> Mapping[tuple[int, ...], Any]:
        return self.states.random()

    @override
    def random_state_grid(self) -> tuple[int, ...] | None:
        return self.states.random_grid()

    @override
    def archives(self) -> Iterator[tuple[str, int, int]]:
        return self.files.archives()

    @override
    def checked_arrays(self) -> Iterator[RawArray]:
        return self.files.checked_arrays()

    @override
    def companions(self) -> dict[str, bytes]:
        return self.files.companions()

    @property
    @override
    def companions_below(self) -> str:
        return self.files.companions_below

    @override
    def unread(self, *, objects: bool = True) -> list[Unread]:
        return self.unread_keys(objects)

    @override
    def notices_of(self, view: Checkpoint) -> list[str]:
        return self.messages(view)


def view_of(checkpoint: Checkpoint) -> CheckpointView:
    """A checkpoint as a view of itself."""
    if isinstance(checkpoint, CheckpointView):
        return checkpoint
    own = checkpoint
    return CheckpointView(
        format=own.format,
        files=Files(
            own.folder, own.reader, own.transfer, own.archives, own.checked_arrays, own.companions, own.companions_below
        ),
        model=StoredWeights(lambda: own.weights, own.sharded_keys),
        trained=StoredOptimizer(
            format=lambda: own.optimizer_format,
            state=lambda: own.optimizer,
            experts_apart=lambda: own.experts_apart,
            param_groups=own.param_groups,
            chain=own.chain,
            grad_scaler=own.grad_scaler,
            rounds_weights=own.rounds_weights,
        ),
        job=Job(
            common=lambda: own.common,
            arguments=lambda: own.arguments,
            iteration=lambda: own.iteration,
            released=own.released,
            vocabulary=lambda: own.vocabulary,
            layers=own.layers,
            orders=own.witnessed_orders,
            sidecar=lambda: (own.sidecar, own.sidecar_problem),
            unbuildable=own.unbuildable,
        ),
        states=States(own.extra_states, own.random_states, own.random_state_grid),
        unread_keys=lambda objects: own.unread(objects=objects),
        messages=own.notices_of,
    )


def renamed(checkpoint: Checkpoint, names: Mapping[str, str]) -> CheckpointView:
    """A checkpoint of which some names are others.

    Args:
        checkpoint: the checkpoint.
        names: what each of its names is to be.
    """
    view, known = view_of(checkpoint), NameMap(names)
    if not known:
        return view
    return replace(
        view,
        model=replace(
            view.model,
            source=lazy(lambda: RenamedWeights(view.weights, known)),
            sharded_keys=lazy(lambda: known.sharded_keys(view.sharded_keys())),
        ),
        trained=replace(
            view.trained, state=lazy(lambda: RenamedState(view.optimizer, known)), shows_registration=False
        ),
        job=replace(view.job, orders=lambda: [RenamedOrder(order, known) for order in view.job.orders()]),
    )


def without_optimizer(checkpoint: Checkpoint) -> CheckpointView:
    """A checkpoint as one of weights alone."""
    view = view_of(checkpoint)
    return replace(view, trained=replace(view.trained, format=lambda: None))


def spelled_as(checkpoint: Checkpoint, other: Checkpoint) -> Checkpoint:
    """A checkpoint under the names that another has, if the two differ in nothing but their layer spec's names."""
    known = set(other.names(WEIGHT))
    names = {name: spelled_as_in(known, name) for name in checkpoint.names(WEIGHT)}
    one_for_one = len(set(names.values())) == len(names)
    return renamed(checkpoint, names) if one_for_one and any(map(ne, names, names.values())) else checkpoint
