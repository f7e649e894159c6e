"""The parts of a checkpoint under other names, for example those of another layer spec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mcore_ckpt_ext.formats.parts import Weights
from mcore_ckpt_ext.formats.weights_view import WeightsView
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.model_space.names import Layer, ShardedKey, is_of_experts, parse
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.optimizers.state_view import StateView
from mcore_ckpt_ext.planning.plan import Copies, Derivation, Source, StoredSlice, TargetSlice, derivation_of, slices_in


class NameMap:
    """A one-to-one mapping between the names of a checkpoint and the names of a view of it."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """`names` maps stored names to new ones; other names do not change."""
        self._changed = {old: new for old, new in names.items() if old != new}
        self._stored = {new: old for old, new in self._changed.items()}

    def __len__(self) -> int:
        """Return the number of names that change."""
        return len(self._changed)

    def stored_name(self, name: str) -> str:
        """Return the stored name for a new one."""
        return self._stored.get(name, name)

    def of(self, stored: str) -> str:
        """Return the new name for a stored one."""
        return self._changed.get(stored, stored)

    def all(self, stored: Iterable[str]) -> list[str]:
        """Return the new names for stored ones."""
        return list(map(self.of, stored))

    def tensor(self, tensor: LogicalTensor | None, name: str) -> LogicalTensor | None:
        """Return a tensor under its new name."""
        return tensor if tensor is None or tensor.name == name else replace(tensor, name=name)

    def slices(self, stored: Sequence[StoredSlice]) -> Sequence[StoredSlice]:
        """Return stored slices under their new names."""
        return [self._slice(stored_slice) for stored_slice in stored] if self._changed else stored

    def copies(self, copies: Copies) -> Copies:
        """Return the copies of a tensor under their new names."""
        return [[list(self.slices(copy)) for copy in part] for part in copies] if self._changed else copies

    def as_stored(self, wanted: TargetSlice) -> TargetSlice:
        """Return a requested slice under the stored names."""
        regions = tuple(self.region_as_stored(region) for region in wanted.slice.regions)
        tensors = {
            self.stored_name(name): replace(tensor, name=self.stored_name(name))
            for name, tensor in wanted.tensors.items()
        }
        return replace(wanted, slice=replace(wanted.slice, regions=regions), tensors=tensors)

    def region_as_stored(self, region: Region) -> Region:
        """Return a region under its stored name."""
        return replace(region, name=self.stored_name(region.name))

    def sharded_keys(self, stored: Mapping[str, ShardedKey]) -> dict[str, ShardedKey]:
        """Return Megatron's sharded keys for the new names, stacked like those of the old ones."""
        keys = {}
        for old, (key, index) in stored.items():
            name = self.of(old)
            keys[name] = (key, index) if name == old else parse(name).sharded_key(len(index) > is_of_experts(key))
        return keys

    def _slice(self, stored: StoredSlice) -> StoredSlice:
        if not any(region.name in self._changed for region in stored.slice.regions):
            return stored
        regions = tuple(replace(region, name=self.of(region.name)) for region in stored.slice.regions)
        return stored._replace(slice=replace(stored.slice, regions=regions))


class _RenamedDerivation:
    """A derivation of a renamed tensor."""

    def __init__(self, derivation: Derivation, names: NameMap) -> None:
        self._derivation = derivation
        self._names = names

    def inputs(self, wanted: TargetSlice) -> Sequence[tuple[Source, TargetSlice]]:
        """Return the inputs to read, under their stored names."""
        return self._derivation.inputs(self._names.as_stored(wanted))

    def values(self, wanted: TargetSlice, inputs: Sequence[Any]) -> Any:
        """Compute the slice."""
        return self._derivation.values(self._names.as_stored(wanted), inputs)


def renamed_weights(weights: Weights, names: NameMap) -> WeightsView:
    """Return the model's arrays under other names."""
    return WeightsView(
        names=lambda: names.all(weights.names()),
        stored_slices=lambda kind, name: names.slices(weights.stored_slices(kind, names.stored_name(name))),
        stored_slices_in=lambda kind, region: names.slices(slices_in(weights, kind, names.region_as_stored(region))),
        logical_tensor=lambda kind, name: names.tensor(weights.logical_tensor(kind, names.stored_name(name)), name),
        derivation=lambda kind, name: _rename_derivation(derivation_of(weights, kind, names.stored_name(name)), names),
        copies=lambda kind, name: names.copies(weights.copies(kind, names.stored_name(name))),
    )


def renamed_state(state: OptimizerState, names: NameMap) -> StateView:
    """Return the optimizer's state under other names; its buffers keep the stored ones."""
    return StateView(
        kinds=state.kinds,
        carried_kinds=state.carried_kinds,
        names=lambda kind=None: names.all(state.names(kind)),
        logical_tensor=lambda kind, name: names.tensor(state.logical_tensor(kind, names.stored_name(name)), name),
        stored_slices=lambda kind, name: names.slices(state.stored_slices(kind, names.stored_name(name))),
        slots=lambda kind, name: names.slices(state.slots(kind, names.stored_name(name))),
        copies=lambda kind, name: names.copies(state.copies(kind, names.stored_name(name))),
        dtypes_of=lambda name: state.dtypes_of(names.stored_name(name)),
        derivation=lambda kind, name: _rename_derivation(state.derivation(kind, names.stored_name(name)), names),
        lost_intervals=lambda kind, name: state.lost_intervals(kind, names.stored_name(name)),
        is_distributed=lambda name: state.is_distributed(names.stored_name(name)),
        order_sources=state.order_sources,
        lost_elements=lambda: {names.of(name): count for name, count in state.lost_elements().items()},
        buffers=state.buffers,
        shifted=names.all(state.shifted),
    )


def _rename_derivation(derivation: Derivation | None, names: NameMap) -> Derivation | None:
    return _RenamedDerivation(derivation, names) if derivation is not None else None


class RenamedOrder:
    """A registration order of parameters that have other names."""

    def __init__(self, order: ParameterOrder, names: NameMap) -> None:
        self._order = order
        self._names = names

    @property
    def label(self) -> str:
        """The name of the order in messages."""
        return self._order.label

    def order_outside_layers(self, items: Sequence[str]) -> list[str] | None:
        """Return parameters outside the layers, and blocks, in registration order; None if one is unknown."""
        stored_names = self._order.order_outside_layers([self._names.stored_name(item) for item in items])
        return stored_names and self._names.all(stored_names)

    def order_in_layer(self, layer: Layer, suffixes: Sequence[str]) -> list[str] | None:
        """Return the suffixes of one layer in registration order; None if one is unknown."""
        prefix = f"{layer.block}.layers.{layer.number}."
        stored = {self._names.stored_name(prefix + suffix).removeprefix(prefix): suffix for suffix in suffixes}
        arranged = self._order.order_in_layer(layer, list(stored))
        return arranged and [stored[suffix] for suffix in arranged]
