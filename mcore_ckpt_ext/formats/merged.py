"""A model with its adapters merged into it, as a checkpoint like others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError, some
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.formats.adapter_order import about_norms
from mcore_ckpt_ext.formats.adapter_scaling import Scaling
from mcore_ckpt_ext.formats.adapters_alone import adapters_in, fit_of_adapters
from mcore_ckpt_ext.formats.base import Checkpoint, Weights
from mcore_ckpt_ext.formats.elsewhere import Elsewhere
from mcore_ckpt_ext.formats.low_rank import Merged, Part, parts_of
from mcore_ckpt_ext.formats.respelled import Respelled
from mcore_ckpt_ext.formats.unread import Unread
from mcore_ckpt_ext.model_space.adapters import is_adapter
from mcore_ckpt_ext.model_space.names import ShardedKey
from mcore_ckpt_ext.model_space.tensors import WEIGHT, LogicalTensor
from mcore_ckpt_ext.planning.plan import Copies, Derivation, StoredSlice
from mcore_ckpt_ext.storage.two_folders import TwoFolders
from mcore_ckpt_ext.transfer import Transfer


class _Weights:
    """A model's own arrays, without those of adapters beside them."""

    def __init__(self, weights: Weights) -> None:
        self._weights, self._names = weights, [name for name in weights.names() if not is_adapter(name)]

    def names(self) -> list[str]:
        """All names."""
        return self._names

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """The tensor as the base knows it; None where it has none of that kind and name."""
        return self._weights.logical_tensor(kind, name)

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """All slices that hold elements of the base's tensor."""
        return self._weights.stored(kind, name)

    def copies(self, kind: str, name: str) -> Copies:
        """The parts of the base's tensor, and the copies of each part."""
        return self._weights.copies(kind, name)


class MergedCheckpoint(Respelled):
    """A base with the adapters of another checkpoint, or of its own, merged into its weights; without optimizer."""

    def __init__(
        self, base: Checkpoint, adapters: Checkpoint, scaling: Scaling, family: Family | None, stated: Mapping[str, Any]
    ) -> None:
        """`scaling`: of the adapters. `family`, `stated`: what the user says of the base.

        Raises:
            UsageError: the two do not belong together.
            UnsupportedCheckpointError: it is not known what one of the adapters is for.
        """
        super().__init__(base, {})
        self.leave_out_optimizer()
        self.base, self.adapters = base, adapters
        self._beside = base.folder.resolve() == adapters.folder.resolve()
        self._check()
        where: Weights = adapters.weights
        if not self._beside:
            self.reader = reader = TwoFolders(base.reader, adapters.reader)
            self.transfer, where = Transfer(reader), Elsewhere(adapters.weights, reader.name_of)
        found = adapters_in(adapters, fit_of_adapters(base, family, stated))
        parts: dict[str, list[Part]] = {}
        for one in found.linears:
            for name, part in parts_of(one, scaling.of_rank(one.rank)):
                self._check_shape(name, one.base.regions[0].sizes[1])
                parts.setdefault(name, []).append(part)
        self._merged = {name: Merged(base.weights, where, own) for name, own in parts.items()}

    def _check(self) -> None:
        names, of_base = self.adapters.names(WEIGHT), self.base.names(WEIGHT)
        if not self._beside and not all(map(is_adapter, names)):
            raise UsageError(
                "the adapters lie beside a model of their own", found=f"--merge {self.base.folder}",
                where=str(self.adapters.folder), helps=f"--merge {self.adapters.folder}",
            )  # fmt: skip
        if not self._beside and (own := [name for name in of_base if is_adapter(name)]):
            raise UsageError("the model to merge into has adapters of its own", found=some(own, 2),
                             where=str(self.base.folder), helps="merge these first")  # fmt: skip

    def _check_shape(self, name: str, columns: int) -> None:
        tensor = self.base.logical_tensor(WEIGHT, name)
        if tensor is None or len(tensor.shape) != 2 or tensor.shape[1] != columns:
            raise UnsupportedCheckpointError(
                "a weight is not there, or does not have the shape of its adapter",
                found=str(tensor.shape) if tensor else "no weight", expected=f"{columns} columns",
                where=f"{name} in {self.base.folder}", helps="name the model that the adapters are for",
            )  # fmt: skip

    @property
    def sources(self) -> list[Checkpoint]:
        """The base and the adapters; one where they lie beside each other."""
        return [self.base] if self._beside else [self.base, self.adapters]

    @cached_property
    @override
    def weights(self) -> Weights:
        return _Weights(self.base.weights)

    @override
    def derivation(self, kind: str, name: str) -> Derivation | None:
        return self._merged.get(name) if kind == WEIGHT else None

    @override
    def sharded_keys(self) -> Mapping[str, ShardedKey]:
        return {name: key for name, key in self.base.sharded_keys().items() if not is_adapter(name)}

    @override
    def extra_states(self) -> Mapping[str, Any]:
        return {name: state for name, state in self.base.extra_states().items() if not is_adapter(name)}

    @override
    def unread(self, *, objects: bool = True) -> list[Unread]:
        of_adapters = [] if self._beside else self.adapters.unread(objects=objects)
        return [*self.base.unread(objects=objects), *of_adapters]

    def about_merging(self) -> list[str]:
        """What a user of the merged model should know."""
        told = f"adapters are merged into {len(self._merged)} weights, in fp32, and rounded once"
        return [told, *about_norms(self.adapters, "this is")]

    @override
    def notices(self) -> list[str]:
        return [*self.about_merging(), *super().notices()]
