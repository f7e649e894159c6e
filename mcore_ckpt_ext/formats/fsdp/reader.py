"""Reads the format `fsdp_dtensor`: Megatron-FSDP's checkpoints in torch's distributed checkpoint.

Sources: `save_checkpoint`, `get_rng_state` and `preprocess_fsdp_dtensor_state_dict` (megatron/training/
checkpointing.py), `sharded_param_state_fsdp_dtensor` (megatron/core/optimizer/distrib_optimizer.py), core_v0.14.0 to
0.19.2. A parameter is one array, the optimizer's fp32 master. The weight that the model computes with is the rounded
master, and is not stored. Each setting of a parameter's group is one object.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.formats.evidence import Bound, Loading
from mcore_ckpt_ext.formats.fsdp.names import HALVES, parameter_of
from mcore_ckpt_ext.formats.initial_extra_states import fresh_extra_states
from mcore_ckpt_ext.formats.parts import StoredOptimizer
from mcore_ckpt_ext.formats.plain_dcp import FSDP_DTENSOR
from mcore_ckpt_ext.formats.portable_state import SHARDING_MARK
from mcore_ckpt_ext.formats.torch_dist.flattened import MODEL, FlattenedCheckpoint
from mcore_ckpt_ext.formats.unread_state import OTHER
from mcore_ckpt_ext.formats.view import OpenedFormat
from mcore_ckpt_ext.job.releases import LOADS_FSDP_DTENSOR
from mcore_ckpt_ext.model_space.names import is_extra_state, is_first_linear, is_module_buffer, parse
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex
from mcore_ckpt_ext.storage.index_entries import StoredArray

NAME = FSDP_DTENSOR
_MODEL = MODEL
_STATE = "optimizer.state."
# The key of a setting: of a parameter; or, as Megatron's own converter writes it, of a group of an optimizer, which may
# be a chained one.
_GROUP = re.compile(
    r"^(?P<owner>optimizer\.(?:param_to_group_meta|(?:\d+\.optimizer\.)?param_groups)\..+)\.(?P<setting>\w+)$"
)
_LABEL = re.compile(rf"^optimizer\.(?:\d+\.)?{SHARDING_MARK}$")
_MASTER = f"{_STATE}{FP32_PARAM}."


class FsdpCheckpoint(FlattenedCheckpoint):
    """One iteration folder in `fsdp_dtensor`."""

    name = NAME

    @cached_property
    @override
    def format(self) -> OpenedFormat:
        loading = Loading(in_megatron=True, flag="--use-megatron-fsdp", loaded_by=LOADS_FSDP_DTENSOR)
        return replace(super().format, loading=loading)

    @cached_property
    @override
    def optimizer(self) -> StoredOptimizer:
        has_masters = any(key.startswith(_MASTER) for key in self.index.arrays)
        return replace(super().optimizer, weights_derived_from_masters=has_masters)

    @override
    def _evidence(self) -> Iterator[Bound]:
        yield "Megatron-FSDP has written this format since 0.14", *LOADS_FSDP_DTENSOR.span

    @override
    def _read_index(self) -> DcpIndex:
        arrays: dict[str, StoredArray] = {}
        halves: dict[str, list[StoredArray | None]] = {}
        for key, array in self._parameters():
            name, half = parameter_of(key, self.recorded_arguments)
            if half is None:
                _add(arrays, replace(array, key=self._prefix(array.key) + name))
            else:
                halves.setdefault(self._prefix(array.key) + name, [None] * len(HALVES))[half] = array
        for key, both in halves.items():
            _add(arrays, _joined_halves(key, both, str(self.folder)))
        for key, array in list(arrays.items()):
            self._check_order(key)
            if not key.startswith(_STATE):
                arrays |= self._weight_and_master(array)
        self._check_layers(arrays)
        ownerless = [key for key in arrays if key.startswith(_STATE) and key.split(".", 3)[3] not in arrays]
        if ownerless:
            raise UnreadableCheckpointError(
                "the checkpoint has optimizer state of a parameter that it does not contain",
                where=f"{self.folder}: {ownerless[0]}",
                hint="it is incomplete: use another iteration",
            )
        return DcpIndex(arrays, {}, {}, has_plans=True)

    def _check_layers(self, keys: Iterable[str]) -> None:
        """Refuse a checkpoint of several pipeline stages, each of which numbers its layers from 0.

        Raises:
            UnsupportedCheckpointError: there are fewer layers than the job had.
        """
        layer_count = len({parse(key).layer for key in keys} - {None})
        if layer_count and layer_count < (self.recorded_arguments.num_layers or 0):
            raise UnsupportedCheckpointError(
                "the layer numbers of pipeline stages are unknown in this format",
                found=quantity(layer_count, "layer"),
                expected=f"{self.recorded_arguments.num_layers}, by the arguments of the job",
                where=str(self.folder),
                hint="resume it with stock Megatron",
            )

    def _parameters(self) -> Iterator[tuple[str, StoredArray]]:
        """Yield the arrays of the model and of the optimizer with their module names."""
        for key, array in self._stored_index.arrays.items():
            if key.startswith(_MODEL):
                yield key.removeprefix(_MODEL), array
            elif key.startswith(_STATE):
                yield key.removeprefix(_STATE).rpartition(".")[0], array

    @staticmethod
    def _prefix(key: str) -> str:
        """Return the prefix of a parameter's name in Megatron's `torch_dist`."""
        return f"{_STATE}{key.rpartition('.')[2]}." if key.startswith(_STATE) else ""

    def _weight_and_master(self, array: StoredArray) -> dict[str, StoredArray]:
        """Return the weight and the master in an fp32 array; empty for other arrays, which are only weights."""
        arguments = self.recorded_arguments
        computes_in = "bfloat16" if arguments.bf16 else "float16" if arguments.fp16 else "float32"
        if array.dtype != "float32" or is_module_buffer(array.key):
            return {}
        weight = {array.key: replace(array, dtype=computes_in)}
        return {**weight, _MASTER + array.key: replace(array, key=_MASTER + array.key)} if self._has_state else weight

    @cached_property
    def _has_state(self) -> bool:
        return any(key.startswith(_STATE) for key in self._stored_index.arrays)

    def _check_order(self, key: str) -> None:
        """Refuse parameters that interleave the parts of tensor-parallel ranks.

        Raises:
            UnsupportedCheckpointError: the parameter interleaves them.
        """
        gated = self.recorded_arguments.quick_geglu or self.recorded_arguments.gated_linear_unit
        takes_turns = is_first_linear(key) and gated and not self.recorded_arguments.swiglu
        if ".mixer." in key or (takes_turns and (self.recorded_arguments.tensor_model_parallel_size or 1) > 1):
            raise UnsupportedCheckpointError(
                "Megatron-FSDP stores this parameter with the parts of its tensor-parallel ranks in turn, which is not "
                "read",
                where=key,
            )

    @override
    def _read_common(self) -> dict[str, Any]:
        # Megatron's own converter stores the format of its source in the content metadata.
        return {**super()._read_common(), "content_metadata": {"distrib_optim_sharding_type": NAME}}

    @cached_property
    def _groups(self) -> list[dict[str, Any]]:
        """The distinct parameter groups; every parameter stores a copy of its group."""
        settings: dict[str, dict[str, Any]] = {}
        for key in self._stored_index.objects:
            if match := _GROUP.match(key):
                settings.setdefault(match["owner"], {})[match["setting"]] = self._stored_object(key)
        distinct: list[dict[str, Any]] = []
        for group in settings.values():
            if group not in distinct:
                distinct.append(group)
        return distinct

    @override
    def _common_optimizers(self) -> list[dict[Any, Any]]:
        return [{"optimizer": {"param_groups": self._groups}}] if self._has_state else []

    @override
    def _is_taken(self, key: str) -> bool:
        # `handle_fp8_extra_state_case` removes extra states.
        is_array = key in self._stored_index.arrays and key.startswith((_MODEL, _STATE))
        return is_array or is_extra_state(key) or any(pattern.match(key) for pattern in (_GROUP, _LABEL))

    @override
    def _extra_states(self) -> Mapping[str, Any]:
        return fresh_extra_states(
            self.model.weights().names(), self.recorded_arguments.transformer_impl == "transformer_engine"
        )

    @override
    def kind_of(self, key: str) -> str:
        if key.startswith(_STATE):
            return key.rpartition(".")[2]
        if not key.startswith(_MODEL):
            return OTHER
        is_master = _MASTER + parameter_of(key.removeprefix(_MODEL), self.recorded_arguments).name in self.index.arrays
        return FP32_PARAM if is_master else WEIGHT


def _add(arrays: dict[str, StoredArray], array: StoredArray) -> None:
    if array.key in arrays:
        raise UnreadableCheckpointError("two arrays are one parameter", where=array.key)
    arrays[array.key] = array


def _joined_halves(key: str, halves: list[StoredArray | None], where: str) -> StoredArray:
    """Join the two halves of a gated projection.

    Raises:
        UnreadableCheckpointError: one half is missing, or they do not match.
    """
    gate, up = halves
    if gate is None or up is None or gate.shape != up.shape or gate.dtype != up.dtype:
        raise UnreadableCheckpointError(
            "a gated projection is stored in halves that do not match",
            found=" and ".join("none" if half is None else f"{half.dtype} {half.shape}" for half in halves),
            where=f"{where}: {key}",
            hint="the checkpoint is incomplete: use another iteration",
        )
    rows = gate.shape[0]
    moved = [chunk._replace(offsets=(chunk.offsets[0] + rows, *chunk.offsets[1:])) for chunk in up.chunks]
    return StoredArray(key, (2 * rows, *gate.shape[1:]), gate.dtype, (*gate.chunks, *moved))
