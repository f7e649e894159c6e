"""An optimizer state as data: a view replaces some members and keeps the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Protocol, TypeVar

from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.optimizers.flat_arrays import Buffers
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.plan import Copies, Derivation, StoredSlice
from mcore_ckpt_ext.planning.source_view import Answer, OfTensor

Item = TypeVar("Item")


class NamesOfKind(Protocol):
    """A function of one kind of state, or of all."""

    def __call__(self, kind: str | None = None) -> list[str]:
        """Return all parameters with state of one kind; by default, of any."""


class OfParameter(Protocol[Answer]):
    """A function of one parameter."""

    def __call__(self, name: str) -> Answer:
        """Return the value for the parameter of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateView(OptimizerState):
    """An optimizer state as replaceable members, see `OptimizerState`.

    `dataclasses.replace` changes some of them.
    """

    kinds: tuple[str, ...]
    carried_kinds: tuple[str, ...]
    names: NamesOfKind
    logical_tensor: OfTensor[LogicalTensor | None]
    stored_slices: OfTensor[Sequence[StoredSlice]]
    slots: OfTensor[Sequence[StoredSlice]]
    copies: OfTensor[Copies]
    dtypes_of: OfParameter[Mapping[str, str]]
    derivation: OfTensor[Derivation | None]
    lost_intervals: OfTensor[list[tuple[int, int]]]
    is_distributed: OfParameter[bool]
    order_sources: Callable[[], list[str]]
    lost_elements: Callable[[], dict[str, int]]
    buffers: Sequence[Buffers]
    shifted: Sequence[str]

    @classmethod
    def of(cls, state: OptimizerState) -> StateView:
        """Return a view with the members of a state."""
        return StateView(**{field.name: getattr(state, field.name) for field in fields(StateView)})


class NoState(OptimizerState):
    """The state of an optimizer without parameters."""

    kinds = ()

    def names(self, kind: str | None = None) -> list[str]:
        """Return no names."""
        return []

    def logical_tensor(self, kind: str, name: str) -> None:
        """Return no tensor."""

    def stored_slices(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """Return no slices."""
        return []

    def copies(self, kind: str, name: str) -> Copies:
        """Return no copies."""
        return []


def join_states(states: Sequence[OptimizerState]) -> OptimizerState:
    """Join the states of several optimizers with disjoint parameters."""
    if len(states) == 1:
        return states[0]
    none = NoState()

    @cache
    def of(name: str) -> OptimizerState:
        return next((state for state in states if state.dtypes_of(name)), none)

    return StateView(
        kinds=_once(kind for state in states for kind in state.kinds),
        carried_kinds=_once(kind for state in states for kind in state.carried_kinds),
        names=lambda kind=None: list(_once(name for state in states for name in state.names(kind))),
        logical_tensor=lambda kind, name: of(name).logical_tensor(kind, name),
        stored_slices=lambda kind, name: of(name).stored_slices(kind, name),
        slots=lambda kind, name: of(name).slots(kind, name),
        copies=lambda kind, name: of(name).copies(kind, name),
        dtypes_of=lambda name: of(name).dtypes_of(name),
        derivation=lambda kind, name: of(name).derivation(kind, name),
        lost_intervals=lambda kind, name: of(name).lost_intervals(kind, name),
        is_distributed=lambda name: of(name).is_distributed(name),
        order_sources=lambda: sorted({order_source for state in states for order_source in state.order_sources()}),
        lost_elements=lambda: {name: count for state in states for name, count in state.lost_elements().items()},
        buffers=[buffers for state in states for buffers in state.buffers],
        shifted=[name for state in states for name in state.shifted],
    )


def _once(items: Iterable[Item]) -> tuple[Item, ...]:
    return tuple(dict.fromkeys(items))
