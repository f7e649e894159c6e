"""Masters that are not stored as separate fp32 numbers, and their derivation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, PARAM_REMAINDER, STALE_MASTER, WEIGHT, LogicalTensor
from mcore_ckpt_ext.optimizers.remainders import are_numbers_of_remainders, join
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.optimizers.state_view import StateView
from mcore_ckpt_ext.planning.plan import Copies, Derivation, ElementByElement, Source, StoredSlice


def joined_masters(state: OptimizerState, weights: Source) -> OptimizerState:
    """Add masters to a state that stores remainders of bf16 weights, by joining the two."""

    def join_with_weight(name: str) -> Derivation:
        weight = weights.logical_tensor(WEIGHT, name)
        if weight is None or weight.dtype != "bfloat16":
            raise UnreadableCheckpointError(
                "the masters are stored as remainders of bf16 weights, which are missing",
                found="no weight" if weight is None else f"a weight of {weight.dtype}",
                expected="a bfloat16 weight",
                where=name,
                hint="the checkpoint is incomplete or its weights were edited: use another iteration",
            )
        return ElementByElement(((weights, WEIGHT), (state, PARAM_REMAINDER)), join)

    return _derived_masters(state, PARAM_REMAINDER, join_with_weight)


def masters_of_trained_weights(state: OptimizerState, weights: Source) -> OptimizerState:
    """Replace the stale masters of fp32 weights by the weights themselves."""
    copied = ElementByElement(((weights, WEIGHT),), lambda values: values)
    view = _derived_masters(state, STALE_MASTER, lambda name: copied)

    def dtypes_of(name: str) -> dict[str, str]:
        return {kind: dtype for kind, dtype in view.dtypes_of(name).items() if kind != STALE_MASTER}

    return replace(view, kinds=view.carried_kinds, dtypes_of=dtypes_of)


def _derived_masters(state: OptimizerState, stored: str, derive: Callable[[str], Derivation]) -> StateView:
    """Add masters that are derived to a state that stores another kind in their place.

    For such a master, `stored_slices` and `copies` return the stored parts and the copies of the other kind.

    Args:
        state: the stored state.
        stored: the other kind.
        derive: returns the derivation of a parameter's master.
    """
    kinds = tuple(dict.fromkeys((FP32_PARAM, *state.kinds)))

    def is_derived(kind: str, name: str) -> bool:
        return kind == FP32_PARAM and state.logical_tensor(stored, name) is not None

    def stored_kind(kind: str, name: str) -> str:
        return stored if is_derived(kind, name) else kind

    def names(kind: str | None = None) -> list[str]:
        if kind != FP32_PARAM:
            return state.names(kind)
        return list(dict.fromkeys([*state.names(FP32_PARAM), *state.names(stored)]))

    def logical_tensor(kind: str, name: str) -> LogicalTensor | None:
        if not is_derived(kind, name):
            return state.logical_tensor(kind, name)
        tensor = state.logical_tensor(stored, name)
        return tensor and LogicalTensor(name, tensor.shape, "float32")

    def dtypes_of(name: str) -> Mapping[str, str]:
        dtypes = state.dtypes_of(name)
        return {**dtypes, FP32_PARAM: "float32"} if stored in dtypes else dtypes

    return replace(
        StateView.of(state),
        kinds=kinds,
        carried_kinds=tuple(kind for kind in kinds if kind != stored),  # masters contain it
        names=names,
        logical_tensor=logical_tensor,
        stored_slices=lambda kind, name: state.stored_slices(stored_kind(kind, name), name),
        copies=lambda kind, name: state.copies(stored_kind(kind, name), name),
        dtypes_of=dtypes_of,
        derivation=lambda kind, name: derive(name) if is_derived(kind, name) else state.derivation(kind, name),
    )


def numbers_of_remainders(state: OptimizerState) -> OptimizerState:
    """Return a state whose "masters" are remainders as numbers, as `fully_reshardable` writes them."""
    kinds = tuple(PARAM_REMAINDER if kind == FP32_PARAM else kind for kind in state.kinds)

    def stored_kind(kind: str) -> str:
        return FP32_PARAM if kind == PARAM_REMAINDER else kind

    def logical_tensor(kind: str, name: str) -> LogicalTensor | None:
        tensor = state.logical_tensor(stored_kind(kind), name) if kind != FP32_PARAM else None
        return LogicalTensor(name, tensor.shape, "int16") if tensor and kind == PARAM_REMAINDER else tensor

    def names(kind: str | None = None) -> list[str]:
        return state.names(kind and stored_kind(kind)) if kind != FP32_PARAM else []

    def derivation(kind: str, name: str) -> Derivation | None:
        if kind != PARAM_REMAINDER:
            return state.derivation(kind, name)

        def compute(numbers: torch.Tensor) -> torch.Tensor:
            if not are_numbers_of_remainders(numbers):
                raise UnreadableCheckpointError(
                    "the masters of a precision-aware optimizer are neither remainders nor masters",
                    expected="whole numbers from -32768 to 32767",
                    where=f"param {name}",
                    hint="the checkpoint is damaged: use another iteration",
                )
            return numbers.to(torch.int16)

        return ElementByElement(((state, FP32_PARAM),), compute)

    def dtypes_of(name: str) -> dict[str, str]:
        dtypes = dict(state.dtypes_of(name))
        return {**dtypes, PARAM_REMAINDER: "int16"} if dtypes.pop(FP32_PARAM, None) else dtypes

    return replace(
        StateView.of(state),
        kinds=kinds,
        carried_kinds=kinds,
        names=names,
        logical_tensor=logical_tensor,
        stored_slices=lambda kind, name: state.stored_slices(stored_kind(kind), name) if kind != FP32_PARAM else [],
        copies=lambda kind, name: state.copies(stored_kind(kind), name),
        dtypes_of=dtypes_of,
        derivation=derivation,
    )


def weights_as_masters(state: OptimizerState, weights: Source, trained: Collection[str] = ()) -> OptimizerState:
    """Add masters to a state that has none for fp32 weights: the weights themselves (`FP32Optimizer`).

    Args:
        state: the stored state.
        weights: the model's arrays.
        trained: the parameters of a state that lists none, for example of SGD without momentum.
    """

    def weight_of(name: str) -> LogicalTensor | None:
        weight = weights.logical_tensor(WEIGHT, name)
        return weight if weight is not None and weight.dtype == "float32" else None

    def logical_tensor(kind: str, name: str) -> LogicalTensor | None:
        tensor = state.logical_tensor(kind, name)
        return weight_of(name) if tensor is None and kind == FP32_PARAM else tensor

    def names(kind: str | None = None) -> list[str]:
        candidates = state.names(kind if kind != FP32_PARAM else None)
        candidates = candidates or (list(trained) if kind in (FP32_PARAM, None) else [])
        return [name for name in candidates if kind != FP32_PARAM or logical_tensor(kind, name) is not None]

    def stored_slices(kind: str, name: str) -> Sequence[StoredSlice]:
        slices = state.stored_slices(kind, name)
        return slices or (weights.stored_slices(WEIGHT, name) if kind == FP32_PARAM and weight_of(name) else slices)

    def copies(kind: str, name: str) -> Copies:
        return [[list(stored_slices(kind, name))]] if kind == FP32_PARAM else state.copies(kind, name)

    def dtypes_of(name: str) -> dict[str, str]:
        dtypes = dict(state.dtypes_of(name))
        has_weight = (dtypes or name in trained) and weight_of(name) is not None
        return {FP32_PARAM: "float32", **dtypes} if has_weight else dtypes

    # Only the weights contain the masters.
    return replace(
        StateView.of(state),
        kinds=tuple(dict.fromkeys((FP32_PARAM, *state.kinds))),
        names=names,
        logical_tensor=logical_tensor,
        stored_slices=stored_slices,
        copies=copies,
        dtypes_of=dtypes_of,
    )


def with_masters(
    state: OptimizerState, weights: Source, trained: Callable[[], Collection[str]] = tuple
) -> OptimizerState:
    """Add masters to a state that stores only the values that they are derived from.

    Args:
        state: the stored state.
        weights: the model's arrays.
        trained: returns the parameters; called if the state lists none.
    """
    if STALE_MASTER in state.kinds:
        state = masters_of_trained_weights(state, weights)
    if PARAM_REMAINDER in state.kinds:
        return joined_masters(state, weights)
    if state.buffers:  # they contain all masters, also of fp32 weights
        return state
    masters = set(state.names(FP32_PARAM))
    names = state.names() or trained()
    return state if masters.issuperset(names) else weights_as_masters(state, weights, names)
