"""Masters that are not stored as fp32 numbers of their own: what they are derived from, and how."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from typing_extensions import override

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, PARAM_REMAINDER, WEIGHT, LogicalTensor
from mcore_ckpt_ext.optimizers.remainders import are_numbers_of_remainders, join
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.optimizers.wrapper import WrappedState
from mcore_ckpt_ext.planning.plan import Copies, Derivation, ElementByElement, Source, StoredSlice


class JoinedMasters(WrappedState):
    """A state that stores remainders beside bf16 weights; its masters are the two joined."""

    def __init__(self, state: OptimizerState, weights: Source) -> None:
        super().__init__(state)
        self._weights = weights
        self.kinds = tuple(dict.fromkeys((FP32_PARAM, *state.kinds)))

    @property
    def carried_kinds(self) -> tuple[str, ...]:
        """Without the remainders, which the masters contain."""
        return tuple(kind for kind in self.kinds if kind != PARAM_REMAINDER)

    @override
    def names(self, kind: str | None = None) -> list[str]:
        if kind != FP32_PARAM:
            return self.state.names(kind)
        return list(dict.fromkeys([*self.state.names(FP32_PARAM), *self.state.names(PARAM_REMAINDER)]))

    @override
    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        if not self._is_joined(kind, name):
            return self.state.logical_tensor(kind, name)
        remainder = self.state.logical_tensor(PARAM_REMAINDER, name)
        return remainder and LogicalTensor(name, remainder.shape, "float32")

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """For a joined master, the slices of its remainders."""
        return self.state.stored(PARAM_REMAINDER if self._is_joined(kind, name) else kind, name)

    def copies(self, kind: str, name: str) -> Copies:
        """For a joined master, the copies of its remainders."""
        return self.state.copies(PARAM_REMAINDER if self._is_joined(kind, name) else kind, name)

    @override
    def derivation(self, kind: str, name: str) -> Derivation | None:
        if not self._is_joined(kind, name):
            return self.state.derivation(kind, name)
        weight = self._weights.logical_tensor(WEIGHT, name)
        if weight is None or weight.dtype != "bfloat16":
            raise UnreadableCheckpointError(
                "the masters are stored as remainders of bf16 weights, which are missing",
                found="no weight" if weight is None else f"a weight of {weight.dtype}",
                expected="a bfloat16 weight",
                where=name,
                hint="the checkpoint is incomplete or its weights were edited: use another iteration",
            )
        return ElementByElement(((self._weights, WEIGHT), (self.state, PARAM_REMAINDER)), join)

    def _is_joined(self, kind: str, name: str) -> bool:
        return kind == FP32_PARAM and self.state.logical_tensor(PARAM_REMAINDER, name) is not None


class NumbersOfRemainders(WrappedState):
    """A state whose stored "masters" are the numbers of remainders, as `fully_reshardable` writes them."""

    def __init__(self, state: OptimizerState) -> None:
        super().__init__(state)
        self.kinds = tuple(PARAM_REMAINDER if kind == FP32_PARAM else kind for kind in state.kinds)

    @override
    def names(self, kind: str | None = None) -> list[str]:
        return self.state.names(_as_stored(kind)) if kind != FP32_PARAM else []

    @override
    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        if kind == FP32_PARAM:
            return None
        found = self.state.logical_tensor(str(_as_stored(kind)), name)
        return LogicalTensor(name, found.shape, "int16") if found and kind == PARAM_REMAINDER else found

    @override
    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        return self.state.stored(str(_as_stored(kind)), name) if kind != FP32_PARAM else []

    @override
    def copies(self, kind: str, name: str) -> Copies:
        return self.state.copies(str(_as_stored(kind)), name)

    @override
    def derivation(self, kind: str, name: str) -> Derivation | None:
        if kind != PARAM_REMAINDER:
            return self.state.derivation(kind, name)

        def compute(numbers: torch.Tensor) -> torch.Tensor:
            if not are_numbers_of_remainders(numbers):
                raise UnreadableCheckpointError(
                    "the masters of a precision-aware optimizer are neither remainders nor masters",
                    expected="whole numbers from -32768 to 32767",
                    where=f"param {name}",
                    hint="the checkpoint is damaged: use another iteration",
                )
            return numbers.to(torch.int16)

        return ElementByElement(((self.state, FP32_PARAM),), compute)


class WeightsAsMasters(WrappedState):
    """A state without masters for fp32 weights: there the weight is the master (`FP32Optimizer`).

    `trained`: the parameters of a state that names none, as that of SGD without momentum.
    """

    def __init__(self, state: OptimizerState, weights: Source, trained: Collection[str] = ()) -> None:
        super().__init__(state)
        self._weights = weights
        self._trained = list(trained)
        self.kinds = tuple(dict.fromkeys((FP32_PARAM, *state.kinds)))

    @override
    def names(self, kind: str | None = None) -> list[str]:
        names = self.state.names(kind if kind != FP32_PARAM else None)
        names = names or (self._trained if kind in (FP32_PARAM, None) else [])
        return [name for name in names if kind != FP32_PARAM or self.logical_tensor(kind, name) is not None]

    @override
    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        found = self.state.logical_tensor(kind, name)
        return self._weight(name) if found is None and kind == FP32_PARAM else found

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """The slices that store the weights."""
        found = self.state.stored(kind, name)
        return found or (self._weights.stored(WEIGHT, name) if kind == FP32_PARAM and self._weight(name) else found)

    @override
    def copies(self, kind: str, name: str) -> Copies:
        return [[list(self.stored(kind, name))]] if kind == FP32_PARAM else self.state.copies(kind, name)

    def _weight(self, name: str) -> LogicalTensor | None:
        weight = self._weights.logical_tensor(WEIGHT, name)
        return weight if weight is not None and weight.dtype == "float32" else None


def with_masters(
    state: OptimizerState, weights: Source, trained: Callable[[], Collection[str]] = tuple
) -> OptimizerState:
    """The same state, with masters where it stores what they are derived from.

    Args:
        state: as it is stored.
        weights: the model's arrays.
        trained: the parameters, asked for where the state names none.
    """
    if PARAM_REMAINDER in state.kinds:
        return JoinedMasters(state, weights)
    if state.buffers:  # which hold every parameter's master, fp32 or not
        return state
    masters, names = set(state.names(FP32_PARAM)), state.names() or trained()
    return state if masters.issuperset(names) else WeightsAsMasters(state, weights, names)


def _as_stored(kind: str | None) -> str | None:
    return FP32_PARAM if kind == PARAM_REMAINDER else kind
