"""A state that answers some questions differently from the one it wraps."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.optimizers.flat_arrays import Buffers
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.plan import Copies, Derivation, StoredSlice


class WrappedState(OptimizerState):
    """Answers like `state`."""

    def __init__(self, state: OptimizerState) -> None:
        self.state = state
        self.kinds = state.kinds

    @property
    @override
    def carried_kinds(self) -> tuple[str, ...]:
        return self.state.carried_kinds

    @override
    def names(self, kind: str | None = None) -> list[str]:
        return self.state.names(kind)

    @override
    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        return self.state.logical_tensor(kind, name)

    @override
    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        return self.state.stored(kind, name)

    @override
    def derivation(self, kind: str, name: str) -> Derivation | None:
        return self.state.derivation(kind, name)

    @override
    def is_distributed(self, name: str) -> bool:
        return self.state.is_distributed(name)

    @override
    def witnesses(self) -> list[str]:
        return self.state.witnesses()

    @override
    def lost_elements(self) -> dict[str, int]:
        return self.state.lost_elements()

    @property
    @override
    def buffers(self) -> Sequence[Buffers]:
        return self.state.buffers

    @property
    @override
    def shifted(self) -> Sequence[str]:
        return self.state.shifted

    @property
    @override
    def written(self) -> OptimizerState:
        return self.state.written

    @override
    def lost(self, kind: str, name: str) -> list[tuple[int, int]]:
        return self.state.lost(kind, name)

    @override
    def copies(self, kind: str, name: str) -> Copies:
        return self.state.copies(kind, name)
