"""Reads the format `torch_dcp`: torch's distributed checkpoint of a job with `--use-torch-fsdp2`.

Sources: `save_checkpoint` and `generate_state_dict` (megatron/training/checkpointing.py), `state_dict` of
`Float16OptimizerWithFloat16Params` and `FP32Optimizer` (megatron/core/optimizer/optimizer.py), core_v0.12.0 to 0.19.2.
Weights have the names of their modules. The optimizer's state is numbered: masters by group and position
(`fp32_from_fp16_params`, for half-precision parameters), moments by torch's parameter ids, which are listed in a
group's `params`. A group lists its parameters in the order of registration, as does the stored model. The group of a
parameter follows from Megatron's rule. Shapes are compared, and masters are verified against their weights on use,
as in every format.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.formats.evidence import Bound, Loading
from mcore_ckpt_ext.formats.param_group_assignment import group_that_holds
from mcore_ckpt_ext.formats.plain_dcp import TORCH_DCP
from mcore_ckpt_ext.formats.torch_dist.flattened import MODEL, FlattenedCheckpoint
from mcore_ckpt_ext.formats.unread_state import OTHER
from mcore_ckpt_ext.formats.view import OpenedFormat
from mcore_ckpt_ext.job.releases import HAS_TORCH_DCP
from mcore_ckpt_ext.layout.local_parameters import model_space_name
from mcore_ckpt_ext.layout.parameter_parts import check_whole
from mcore_ckpt_ext.model_space.names import is_extra_state, is_module_buffer
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex
from mcore_ckpt_ext.storage.index_entries import StoredArray

NAME = TORCH_DCP
_STATE = "optimizer.state."
# The inner optimizer's dict is nested in another one, unless the job trains in fp32.
_GROUP = re.compile(r"^(?P<inner>optimizer\.(?:optimizer\.)?)param_groups\.(?P<group>\d+)\.(?P<setting>\w+)$")
_MASTER = re.compile(r"^optimizer\.fp32_from_fp16_params\.(?P<group>\d+)\.(?P<position>\d+)$")
_MOMENT = re.compile(r"^optimizer\.(?:optimizer\.)?state\.(?P<id>\d+)\.(?P<kind>\w+)$")


class TorchDcpCheckpoint(FlattenedCheckpoint):
    """One iteration folder in `torch_dcp`."""

    name = NAME

    @cached_property
    @override
    def format(self) -> OpenedFormat:
        loading = Loading(
            in_megatron=True,
            flag="--use-torch-fsdp2",
            loaded_by=HAS_TORCH_DCP,
            failure="its loader calls ChainedOptimizer.state_dict with an argument that it does not have",
        )
        return replace(super().format, loading=loading)

    @override
    def _evidence(self) -> Iterator[Bound]:
        yield "jobs with --use-torch-fsdp2 have written this format since 0.12", *HAS_TORCH_DCP.span

    @override
    def _read_index(self) -> DcpIndex:
        weights = {name: replace(array, key=name) for name, array in self._stored_weights()}
        state = dict(self._state(weights)) if self._groups else {}
        return DcpIndex({**weights, **state}, {}, {}, has_plans=True)

    def _stored_weights(self) -> Iterator[tuple[str, StoredArray]]:
        """Yield each weight by its name in model space, in the order of registration."""
        for key, array in self._stored_index.arrays.items():
            if key.startswith(MODEL) and not is_extra_state(key):
                yield check_whole(model_space_name(key.removeprefix(MODEL), 0, 0, self.recorded_arguments), NAME), array

    def _state(self, weights: Mapping[str, StoredArray]) -> Iterator[tuple[str, StoredArray]]:
        """Yield masters and moments by their keys in `torch_dist`."""
        for name, arrays in self._owned_arrays(weights).items():
            for kind, array in arrays.items():
                if array.shape != weights[name].shape:
                    raise self._unknown(f"{kind} of shape {array.shape}, a weight of {weights[name].shape}", name)
                key = f"{_STATE}{kind}.{name}"
                yield key, replace(array, key=key)

    def _owned_arrays(self, weights: Mapping[str, StoredArray]) -> dict[str, dict[str, StoredArray]]:
        """Return the optimizer's arrays of each parameter, by kind.

        Raises:
            UnsupportedCheckpointError: their number differs from that of parameters.
        """
        masters: dict[int, dict[int, StoredArray]] = {}
        moments: dict[int, dict[str, StoredArray]] = {}
        for key, array in self._stored_index.arrays.items():
            if match := _MASTER.match(key):
                masters.setdefault(int(match["group"]), {})[int(match["position"])] = array
            elif match := _MOMENT.match(key):
                moments.setdefault(int(match["id"]), {})[match["kind"]] = array
        ids = [deque(group.get("params", ())) for group in self._groups]
        halves = [deque(array for _, array in sorted(masters.get(n, {}).items())) for n in range(len(ids))]
        owned: dict[str, dict[str, StoredArray]] = {}
        for name, weight in weights.items():
            if is_module_buffer(name):
                continue
            group = group_that_holds(name, weight.shape, self._groups, self.recorded_arguments)
            is_half = weight.dtype != "float32"
            if not ids[group] or (is_half and not halves[group]):
                raise self._unknown("no state for it", name)
            master = {FP32_PARAM: halves[group].popleft()} if is_half else {}
            owned[name] = {**master, **moments.pop(ids[group].popleft(), {})}
        if left := sum(map(len, [*ids, *halves])) + len(moments):
            raise self._unknown(f"state of {quantity(left, 'further parameter')}", "the stored model")
        return owned

    def _unknown(self, problem: str, name: str) -> UnsupportedCheckpointError:
        return UnsupportedCheckpointError(
            "cannot determine which optimizer state belongs to which weight",
            found=problem,
            expected="state for every parameter, group by group, in the order of the stored model",
            where=f"{name}, {self.folder}",
            hint="resume it once with Megatron and save with --ckpt-format torch_dist",
        )

    @cached_property
    def _groups(self) -> Sequence[dict[str, Any]]:
        """The parameter groups.

        Raises:
            UnsupportedCheckpointError: a group has no step, because torch's own Adam stores it by parameter.
        """
        by_number: dict[int, dict[str, Any]] = {}
        for key in self._stored_index.objects:
            if match := _GROUP.match(key):
                by_number.setdefault(int(match["group"]), {})[match["setting"]] = self._stored_object(key)
        groups = [group for _, group in sorted(by_number.items())]
        if any("betas" in group and "step" not in group for group in groups):
            raise UnsupportedCheckpointError(
                "this format is not read with the state of torch's own Adam, which counts steps per parameter",
                where=str(self.folder),
                hint="resume it once with Megatron and save with --ckpt-format torch_dist",
            )
        return groups

    @override
    def _common_optimizers(self) -> list[dict[Any, Any]]:
        if not self._groups:
            return []
        inner = {"param_groups": list(self._groups)}
        has_masters = any(_MASTER.match(key) for key in self._stored_index.arrays)
        return [{"optimizer": inner} if has_masters else inner]

    @override
    def _extra_states(self) -> Mapping[str, Any]:
        return {
            model_space_name(key.removeprefix(MODEL), 0, 0, self.recorded_arguments): self._stored_object(key)
            for key in self._stored_index.objects
            if key.startswith(MODEL) and is_extra_state(key)
        }

    @override
    def _is_taken(self, key: str) -> bool:
        if key in self._stored_index.objects:
            return bool(_GROUP.match(key)) or (key.startswith(MODEL) and is_extra_state(key))
        of_optimizer = bool(_MASTER.match(key) or _MOMENT.match(key))
        return of_optimizer or (key.startswith(MODEL) and not is_extra_state(key))

    @override
    def kind_of(self, key: str) -> str:
        if match := _MOMENT.match(key):
            return match["kind"]
        if _MASTER.match(key):
            return FP32_PARAM
        return WEIGHT if key.startswith(MODEL) else OTHER
