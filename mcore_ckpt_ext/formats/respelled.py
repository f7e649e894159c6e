"""A checkpoint under other names than it has, as another layer spec has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import ne
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.formats.base import Checkpoint, Weights
from mcore_ckpt_ext.formats.unread import Unread
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.model_space.names import ShardedKey, of_experts, parse, spelled_as_in
from mcore_ckpt_ext.model_space.tensors import WEIGHT, LogicalTensor
from mcore_ckpt_ext.optimizers.flat_arrays import Buffers
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.extents import RawArray
from mcore_ckpt_ext.planning.plan import Copies, Derivation, Source, StoredSlice, WantedSlice, derivation_of


class _Names:
    """The names of a checkpoint and those that stand for them, one for one."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._changed = {old: new for old, new in names.items() if old != new}
        self._stored = {new: old for old, new in self._changed.items()}

    def stored(self, name: str) -> str:
        """The checkpoint's own name."""
        return self._stored.get(name, name)

    def of(self, stored: str) -> str:
        """What stands for a name of the checkpoint's own."""
        return self._changed.get(stored, stored)

    def all(self, stored: Iterable[str]) -> list[str]:
        """What stands for names of the checkpoint's own."""
        return list(map(self.of, stored))

    def renamed(self, tensor: LogicalTensor | None, name: str) -> LogicalTensor | None:
        """A tensor under the name that stands for its own."""
        return tensor if tensor is None or tensor.name == name else replace(tensor, name=name)

    def slices(self, stored: Sequence[StoredSlice], name: str) -> Sequence[StoredSlice]:
        """Slices of a tensor under the name that stands for its own."""
        return [self._slice(one) for one in stored] if name in self._stored else stored

    def as_stored(self, wanted: WantedSlice) -> WantedSlice:
        """A wanted slice under the names of the checkpoint's own."""
        regions = tuple(replace(region, name=self.stored(region.name)) for region in wanted.slice.regions)
        tensors = {self.stored(name): replace(one, name=self.stored(name)) for name, one in wanted.tensors.items()}
        return replace(wanted, slice=replace(wanted.slice, regions=regions), tensors=tensors)

    def _slice(self, stored: StoredSlice) -> StoredSlice:
        regions = tuple(replace(region, name=self.of(region.name)) for region in stored.slice.regions)
        return replace(stored, slice=replace(stored.slice, regions=regions))


class _Derivation:
    """A derivation of a tensor that has another name."""

    def __init__(self, derivation: Derivation, names: _Names) -> None:
        self._derivation, self._names = derivation, names

    def inputs(self, wanted: WantedSlice) -> Sequence[tuple[Source, WantedSlice]]:
        """What has to be read, under the names that it is stored under."""
        return self._derivation.inputs(self._names.as_stored(wanted))

    def values(self, wanted: WantedSlice, inputs: Sequence[Any]) -> Any:
        """The slice."""
        return self._derivation.values(self._names.as_stored(wanted), inputs)


class _Source:
    """A source under other names."""

    def __init__(self, source: Source, names: _Names) -> None:
        self._source, self._names = source, names

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        return self._names.slices(self._source.stored(kind, self._names.stored(name)), name)

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        return self._names.renamed(self._source.logical_tensor(kind, self._names.stored(name)), name)

    def derivation(self, kind: str, name: str) -> Derivation | None:
        found = derivation_of(self._source, kind, self._names.stored(name))
        return _Derivation(found, self._names) if found else None


class _Weights(_Source):
    """The model's arrays under other names."""

    def __init__(self, weights: Weights, names: _Names) -> None:
        super().__init__(weights, names)
        self._weights = weights

    def names(self) -> list[str]:
        """All names."""
        return self._names.all(self._weights.names())

    def copies(self, kind: str, name: str) -> Copies:
        """The parts of a tensor, and the copies of each part."""
        parts = self._weights.copies(kind, self._names.stored(name))
        return [[list(self._names.slices(copy, name)) for copy in part] for part in parts]


class _Optimizer(OptimizerState):
    """The optimizer's state under other names."""

    def __init__(self, state: OptimizerState, names: _Names) -> None:
        self._state, self._names, self._source = state, names, _Source(state, names)
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
        parts = self._state.copies(kind, self._names.stored(name))
        return [[list(self._names.slices(copy, name)) for copy in part] for part in parts]

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
        return _Optimizer(self._state.written, self._names)


class Respelled(Checkpoint):
    """A checkpoint of which some names are others; all else is as it is."""

    def __init__(self, source: Checkpoint, names: Mapping[str, str]) -> None:
        """`names`: what each of its names is to be."""
        # Not of the base class: the folder is open.
        self.folder, self.reader, self.transfer = source.folder, source.reader, source.transfer
        self.format = source.format
        self._witnesses: tuple[ParameterOrder, ...] = ()
        self._without_optimizer = False
        self._source, self._names = source, _Names(names)

    @property
    @override
    def common(self) -> dict[str, Any]:
        return self._source.common

    @cached_property
    @override
    def arguments(self) -> JobArguments:
        return self._source.arguments

    @property
    @override
    def iteration(self) -> int:
        return self._source.iteration

    @property
    @override
    def companions_below(self) -> str:
        return self._source.companions_below

    @cached_property
    @override
    def weights(self) -> Weights:
        return _Weights(self._source.weights, self._names)

    @property
    @override
    def stored_optimizer_format(self) -> str | None:
        return self._source.stored_optimizer_format

    @cached_property
    @override
    def optimizer(self) -> OptimizerState:
        return _Optimizer(self._source.optimizer, self._names)

    @property
    @override
    def experts_apart(self) -> bool:
        return self._source.experts_apart

    @override
    def layers(self) -> list[list[range]] | None:
        return self._source.layers()

    @override
    def sharded_keys(self) -> Mapping[str, ShardedKey]:
        found = {}
        for old, (key, index) in self._source.sharded_keys().items():
            name = self._names.of(old)
            stacked = len(index) > of_experts(key)
            found[name] = (key, index) if name == old else parse(name).sharded_key(stacked)
        return found

    @override
    def unread(self, *, objects: bool = True) -> list[Unread]:
        return self._source.unread(objects=objects)

    @override
    def param_groups(self) -> list[dict[str, Any]]:
        return self._source.param_groups()

    @override
    def chain(self) -> list[dict[str, Any]]:
        return self._source.chain()

    @override
    def grad_scaler(self) -> dict[str, Any] | None:
        return self._source.grad_scaler()

    @override
    def extra_states(self) -> Mapping[str, Any]:
        return self._source.extra_states()

    @override
    def random_states(self) -> Mapping[tuple[int, ...], Any]:
        return self._source.random_states()

    @override
    def random_state_grid(self) -> tuple[int, ...] | None:
        return self._source.random_state_grid()

    @override
    def archives(self) -> Iterator[tuple[str, int, int]]:
        return self._source.archives()

    @override
    def checked_arrays(self) -> Iterator[RawArray]:
        return self._source.checked_arrays()

    @override
    def notices(self) -> list[str]:
        return self._source.notices()


def spelled_as(checkpoint: Checkpoint, other: Checkpoint) -> Checkpoint:
    """A checkpoint under the names that another has, if the two differ in nothing but their layer spec's names."""
    known = set(other.names(WEIGHT))
    names = {name: spelled_as_in(known, name) for name in checkpoint.names(WEIGHT)}
    one_for_one = len(set(names.values())) == len(names)
    return Respelled(checkpoint, names) if one_for_one and any(map(ne, names, names.values())) else checkpoint
