"""The parts of a checkpoint under other names, as another layer spec has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.formats.parts import Weights
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.model_space.names import Layer, ShardedKey, of_experts, parse
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.optimizers.flat_arrays import Buffers
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.plan import Copies, Derivation, Source, StoredSlice, WantedSlice, derivation_of, slices_in


class NameMap:
    """The names of a checkpoint and those that stand for them, one for one."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """`names`: what each name of the checkpoint becomes; names that are not in it stay."""
        self._changed = {old: new for old, new in names.items() if old != new}
        self._stored = {new: old for old, new in self._changed.items()}

    def __len__(self) -> int:
        """How many names change."""
        return len(self._changed)

    def stored(self, name: str) -> str:
        """The checkpoint's own name."""
        return self._stored.get(name, name)

    def of(self, stored: str) -> str:
        """What stands for a name of the checkpoint's own."""
        return self._changed.get(stored, stored)

    def all(self, stored: Iterable[str]) -> list[str]:
        """What stands for names of the checkpoint's own."""
        return list(map(self.of, stored))

    def tensor(self, tensor: LogicalTensor | None, name: str) -> LogicalTensor | None:
        """A tensor under the name that stands for its own."""
        return tensor if tensor is None or tensor.name == name else replace(tensor, name=name)

    def slices(self, stored: Sequence[StoredSlice]) -> Sequence[StoredSlice]:
        """Slices under the names that stand for their own."""
        return [self._slice(one) for one in stored] if self._changed else stored

    def copies(self, copies: Copies) -> Copies:
        """The same of the copies of a tensor."""
        return [[list(self.slices(copy)) for copy in part] for part in copies] if self._changed else copies

    def as_stored(self, wanted: WantedSlice) -> WantedSlice:
        """A wanted slice under the names of the checkpoint's own."""
        regions = tuple(self.region_as_stored(region) for region in wanted.slice.regions)
        tensors = {self.stored(name): replace(one, name=self.stored(name)) for name, one in wanted.tensors.items()}
        return replace(wanted, slice=replace(wanted.slice, regions=regions), tensors=tensors)

    def region_as_stored(self, region: Region) -> Region:
        """A region under the name of the checkpoint's own."""
        return replace(region, name=self.stored(region.name))

    def sharded_keys(self, stored: Mapping[str, ShardedKey]) -> dict[str, ShardedKey]:
        """The sharded keys that Megatron has for the new names, stacked as those of the old ones are."""
        found = {}
        for old, (key, index) in stored.items():
            name = self.of(old)
            found[name] = (key, index) if name == old else parse(name).sharded_key(len(index) > of_experts(key))
        return found

    def _slice(self, stored: StoredSlice) -> StoredSlice:
        if not any(region.name in self._changed for region in stored.slice.regions):
            return stored
        regions = tuple(replace(region, name=self.of(region.name)) for region in stored.slice.regions)
        return replace(stored, slice=replace(stored.slice, regions=regions))


class _RenamedDerivation:
    """A derivation of a tensor that has another name."""

    def __init__(self, derivation: Derivation, names: NameMap) -> None:
        self._derivation, self._names = derivation, names

    def inputs(self, wanted: WantedSlice) -> Sequence[tuple[Source, WantedSlice]]:
        """What has to be read, under the names that it is stored under."""
        return self._derivation.inputs(self._names.as_stored(wanted))

    def values(self, wanted: WantedSlice, inputs: Sequence[Any]) -> Any:
        """The slice."""
        return self._derivation.values(self._names.as_stored(wanted), inputs)


class RenamedSource:
    """A source under other names."""

    def __init__(self, source: Source, names: NameMap) -> None:
        self._source, self._names = source, names

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """All slices that hold elements of a tensor."""
        return self._names.slices(self._source.stored(kind, self._names.stored(name)))

    def stored_in(self, kind: str, region: Region) -> Sequence[StoredSlice]:
        """At least the slices that hold elements of a region."""
        return self._names.slices(slices_in(self._source, kind, self._names.region_as_stored(region)))

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """The tensor as the checkpoint knows it; None where it has none of that kind and name."""
        return self._names.tensor(self._source.logical_tensor(kind, self._names.stored(name)), name)

    def derivation(self, kind: str, name: str) -> Derivation | None:
        """How a tensor is derived; None where it is stored."""
        found = derivation_of(self._source, kind, self._names.stored(name))
        return _RenamedDerivation(found, self._names) if found else None


class RenamedWeights(RenamedSource):
    """The model's arrays under other names."""

    def __init__(self, weights: Weights, names: NameMap) -> None:
        super().__init__(weights, names)
        self._weights = weights

    def names(self) -> list[str]:
        """All names."""
        return self._names.all(self._weights.names())

    def copies(self, kind: str, name: str) -> Copies:
        """The parts of a tensor, and the copies of each part."""
        return self._names.copies(self._weights.copies(kind, self._names.stored(name)))


class RenamedState(OptimizerState):
    """The optimizer's state under other names; its buffers keep theirs."""

    def __init__(self, state: OptimizerState, names: NameMap) -> None:
        self._state, self._names, self._source = state, names, RenamedSource(state, names)
        self.kinds = state.kinds

    @override
    def names(self, kind: str | None = None) -> list[str]:
        return self._names.all(self._state.names(kind))

    @override
    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        return self._source.logical_tensor(kind, name)

    @override
    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        return self._source.stored(kind, name)

    @override
    def copies(self, kind: str, name: str) -> Copies:
        return self._names.copies(self._state.copies(kind, self._names.stored(name)))

    @override
    def derivation(self, kind: str, name: str) -> Derivation | None:
        return self._source.derivation(kind, name)

    @property
    @override
    def carried_kinds(self) -> tuple[str, ...]:
        return self._state.carried_kinds

    @override
    def is_distributed(self, name: str) -> bool:
        return self._state.is_distributed(self._names.stored(name))

    @override
    def witnesses(self) -> list[str]:
        return self._state.witnesses()

    @override
    def lost_elements(self) -> dict[str, int]:
        return {self._names.of(name): count for name, count in self._state.lost_elements().items()}

    @override
    def lost(self, kind: str, name: str) -> list[tuple[int, int]]:
        return self._state.lost(kind, self._names.stored(name))

    @property
    @override
    def buffers(self) -> Sequence[Buffers]:
        return self._state.buffers

    @property
    @override
    def shifted(self) -> Sequence[str]:
        return self._names.all(self._state.shifted)

    @property
    @override
    def written(self) -> OptimizerState:
        return RenamedState(self._state.written, self._names)


class RenamedOrder:
    """A registration order of parameters that have other names."""

    def __init__(self, order: ParameterOrder, names: NameMap) -> None:
        self._order, self._names = order, names

    @property
    def label(self) -> str:
        """For messages."""
        return self._order.label

    def frame(self, items: Sequence[str]) -> list[str] | None:
        """Parameters outside the layers, and blocks, in registration order; None if it does not know them all."""
        found = self._order.frame([self._names.stored(item) for item in items])
        return found and self._names.all(found)

    def arrange(self, layer: Layer, suffixes: Sequence[str]) -> list[str] | None:
        """The suffixes of one layer in registration order; None if it does not know them all."""
        prefix = f"{layer.block}.layers.{layer.number}."
        stored = {self._names.stored(prefix + suffix).removeprefix(prefix): suffix for suffix in suffixes}
        found = self._order.arrange(layer, list(stored))
        return found and [stored[suffix] for suffix in found]
