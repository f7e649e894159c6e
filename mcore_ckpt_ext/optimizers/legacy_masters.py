"""Legacy optimizer state without DistributedOptimizer: one tensor for each master and moment.

Each rank stores those of its own parameters. Source: `Float16OptimizerWithFloat16Params.state_dict`,
megatron/core/optimizer/optimizer.py, core_v0.7.0 to 0.19.2: `fp32_from_fp16_params` lists the masters group by group,
within a group in the order in which its parameters were registered, and `optimizer` is torch's own dict, whose ids are
counted across the groups. The group of a parameter is not recorded: each weight is assigned the next master of the
group whose next master rounds to the weight. `FP32Optimizer` stores torch's dict alone; its state is assigned by shape,
because Megatron's groups differ in the number of axes (`_get_param_groups`, megatron/core/optimizer/__init__.py). If
two groups match, the state is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import PackingError, UnreadableCheckpointError, UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.master_check import first_mismatch
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.rank_arrays import RankArrays
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.names import is_module_buffer, is_of_experts
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ, FP32_PARAM
from mcore_ckpt_ext.optimizers.flat_arrays import FlatArray, FlatPiece
from mcore_ckpt_ext.optimizers.groups import keeps_nothing
from mcore_ckpt_ext.optimizers.optimizer_format import Encoding, Holder, StoredKeys
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.storage.dcp_index import extent_of
from mcore_ckpt_ext.storage.index_entries import StoredObject
from mcore_ckpt_ext.storage.tensor_reference import TensorReference
from mcore_ckpt_ext.transfer import Transfer, read_slice

NAME = "legacy_torch_per_parameter"
MASTERS = "fp32_from_fp16_params"
_SAMPLE = 64
# Settings that only groups of Adam have (Lion has no eps, SGD no betas), and Adam's state for each parameter.
_ADAM = frozenset({"betas", "eps"})
_MOMENTS_OF_ADAM = frozenset({EXP_AVG, EXP_AVG_SQ})


@dataclass(frozen=True)
class _Queue:
    """The state of a group's parameters, in order; `of_experts`: whether it is a group for experts."""

    items: deque[dict[str, TensorReference]]
    of_experts: bool


@dataclass(frozen=True)
class RankOptimizers:
    """A rank's chained optimizers, and its parameters in registration order; tensors are in `place`."""

    tensor: int
    place: StoredObject
    optimizers: Sequence[Mapping[str, Any]]
    parameters: Sequence[tuple[str, TensorReference]]


class LegacyMasters(RankArrays, OptimizerState):
    """The optimizer state of a checkpoint, in model space."""

    def __init__(
        self,
        ranks: Iterable[RankOptimizers],
        arguments: JobArguments,
        layout: ParallelLayout,
        transfer: Transfer,
    ) -> None:
        """Assign masters to weights.

        Raises:
            PackingError: masters cannot be assigned to weights.
            UnsupportedCheckpointError: see `_queues`.
        """
        super().__init__(arguments, layout)
        self._transfer = transfer
        for rank in ranks:
            self._add_rank(rank)

    @property
    @override
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]  # known only after all ranks are read
        kinds = dict.fromkeys(kind for kind, _ in self._tensors)
        return tuple(sorted(kinds, key=lambda kind: kind != FP32_PARAM))

    @override
    def names(self, kind: str | None = None) -> list[str]:
        return list(dict.fromkeys(name for of_kind, name in self._tensors if kind in (None, of_kind)))

    @override
    def is_distributed(self, name: str) -> bool:
        return False

    def order_sources(self) -> list[str]:
        """Return the source of the parameter order."""
        return ["the order of the stored masters"]

    def _add_rank(self, rank: RankOptimizers) -> None:
        self.recognize_gates(rank.parameters)
        queues = [queue for optimizer in rank.optimizers for queue in _queues(optimizer, rank.place.file)]
        items = [item for queue in queues for item in queue.items]
        if not any(items):
            return  # SGD without momentum, in fp32
        if not all(FP32_PARAM in item for item in items):
            if all(weight.storage.dtype.name != "float32" for _, weight in rank.parameters):
                raise _unknown("no masters", rank.place.file)
            self._check_all_trained(len(items), rank)
        apart = any(queue.of_experts for queue in queues)
        for name, weight in rank.parameters:
            candidates = [
                queue.items for queue in queues if queue.items and queue.of_experts == (apart and is_of_experts(name))
            ]
            fitting = [items for items in candidates if self._fits(items[0], weight, rank.place)]
            if len(fitting) > 1:
                raise self._ambiguous(f"{quantity(len(fitting), 'group has', 'groups have')} state for it", name, rank)
            for kind, tensor in fitting[0].popleft().items() if fitting else ():  # without a match, it is not trained
                self.add(kind, name, tensor, rank.tensor, rank.place)
        if left := sum(len(queue.items) for queue in queues):
            raise self._ambiguous(
                f"{quantity(left, 'master or moment fits', 'masters or moments fit')} no weight",
                "the stored model",
                rank,
            )

    def _check_all_trained(self, stored: int, rank: RankOptimizers) -> None:
        """In fp32 training, check that all parameters have state; otherwise shapes and order are not certain."""
        parameters = [name for name, _ in rank.parameters if not is_module_buffer(name)]
        if stored != len(parameters):
            raise self._ambiguous(f"state of {stored} parameters, of {len(parameters)}", "the stored model", rank)

    def _ambiguous(self, problem: str, name: str, rank: RankOptimizers) -> PackingError:
        return PackingError(
            "cannot determine which optimizer state belongs to which weight",
            found=problem,
            where=f"{name}, {rank.place.file}",
            hint="the checkpoint is damaged or its weights were edited after the save: use another iteration",
        )

    def _fits(self, item: Mapping[str, TensorReference], weight: TensorReference, place: StoredObject) -> bool:
        if any(tensor.shape != weight.shape for tensor in item.values()):
            return False
        if FP32_PARAM not in item:
            return weight.storage.dtype.name == "float32"
        return first_mismatch(self._sample(item[FP32_PARAM], place), self._sample(weight, place)) is None

    def _sample(self, tensor: TensorReference, place: StoredObject) -> torch.Tensor:
        region = Region.whole("sample", tensor.shape)
        extent = extent_of(tensor, place)
        array = FlatArray(region.numel, extent.dtype, (FlatPiece(0, region.numel, extent, tensor.offset),))
        flat = Region.whole("sample", (region.numel,))
        return read_slice(array, self._transfer, FP32_PARAM, Slice((flat,), 0, min(region.numel, _SAMPLE)))


def _queues(optimizer: Mapping[str, Any], where: str) -> list[_Queue]:
    """Return the state of each group's parameters, in order.

    Raises:
        UnsupportedCheckpointError: parameters of a group have different kinds of state, or there is no step.
    """
    masters = optimizer.get(MASTERS)
    inner = optimizer.get("optimizer", optimizer)
    groups = inner.get("param_groups", [])
    state = inner.get("state", {})
    queues: list[_Queue] = []
    for number, group in enumerate(groups):
        entries = [_tensors(state.get(parameter, {})) for parameter in group["params"]]
        if masters is not None and number < len(masters) and len(masters[number]) == len(entries):
            entries = [{FP32_PARAM: m, **entry} for m, entry in zip(masters[number], entries, strict=True)]
        elif masters is not None:
            raise UnreadableCheckpointError(
                "masters and parameter groups of this legacy checkpoint are not of the same parameters",
                found=quantity(len(masters[number]) if number < len(masters) else 0, "master"),
                expected=f"{len(entries)}, one for each parameter of group {number}",
                where=where,
                hint="the file was edited, or is damaged: use another iteration",
            )
        kinds = {frozenset(entry) - {FP32_PARAM} for entry in entries}
        is_new = masters is not None and not group.get("step")  # see `first_step`
        if len(kinds) > 1 or (frozenset() in kinds and not (is_new or keeps_nothing([group]))):
            raise _unknown("not the same state for all parameters of a group", where)
        # torch's Adam stores the step for each parameter.
        has_steps = "step" in group or all("step" in state.get(parameter, {}) for parameter in group["params"])
        if EXP_AVG_SQ in next(iter(kinds), ()) and not has_steps:  # Lion has no step
            raise _unknown("no step in a parameter group or in the state of its parameters", where)
        if any(kinds) and group.keys() >= _ADAM and kinds != {_MOMENTS_OF_ADAM}:
            raise _unknown(f"a group of Adam that keeps {', '.join(sorted(kinds.pop()))}", where)
        queues.append(_Queue(deque(entries), bool(group.get("is_expert_parallel"))))
    return queues


def _tensors(entry: Mapping[str, Any]) -> dict[str, TensorReference]:
    return {str(kind): value for kind, value in entry.items() if isinstance(value, TensorReference) and value.shape}


def _unknown(problem: str, where: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        "the optimizer state of this legacy checkpoint is not as Megatron's optimizers keep it",
        found=problem,
        expected=f"{MASTERS} if weights are not fp32, the same state for every parameter, a step in each group or in "
        "the state of each parameter",
        where=where,
        hint="resume it once under its own layout, and save with --use-distributed-optimizer",
    )


def _nothing(holder: Holder, keys: StoredKeys, models: Callable[[], LocalModels]) -> OptimizerState:
    raise UnsupportedCheckpointError("a torch_dist checkpoint has no rank files", where=str(holder.folder))


ENCODINGS = (
    Encoding(
        name=NAME,
        stored="the masters and moments of each rank's parameters, one tensor each",
        written_by="the optimizers without --use-distributed-optimizer, of every version, in legacy checkpoints",
        claims=lambda keys: (),
        read=_nothing,
        needs_same_buffers=True,
        shows_names=False,
        distributed=False,
        opening_reads_elements=True,
        is_in_rank_files=True,
    ),
)
