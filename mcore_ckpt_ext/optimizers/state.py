"""Protocol of a checkpoint's optimizer state, in any format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.optimizers.flat_arrays import Buffers
from mcore_ckpt_ext.planning.plan import Derivation, StoredOnce, StoredSlice


class OptimizerState(StoredOnce, ABC):
    """The optimizer state of a checkpoint, in model space.

    `kinds`: names of the stored kinds, master and moments; not every parameter has every kind.
    """

    kinds: tuple[str, ...]

    @abstractmethod
    def names(self, kind: str | None = None) -> list[str]:
        """Return all parameters with state of one kind; by default, of any."""

    @abstractmethod
    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """Return the name, shape and dtype of a tensor; None if the checkpoint does not contain it."""

    def dtypes_of(self, name: str) -> Mapping[str, str]:
        """Return the kinds of a parameter's state with their dtypes, by metadata alone.

        Of gradient buffers, all parameters that may be in them have every kind.
        """
        tensors = {kind: self.logical_tensor(kind, name) for kind in self.kinds}
        return {kind: tensor.dtype for kind, tensor in tensors.items() if tensor is not None}

    def derivation(self, kind: str, name: str) -> Derivation | None:
        """Return the derivation of a tensor from others; None if it is stored."""
        return None

    @property
    def carried_kinds(self) -> tuple[str, ...]:
        """The kinds from which all others can be derived."""
        return self.kinds

    def is_distributed(self, name: str) -> bool:
        """Return whether a parameter's state belongs to a DistributedOptimizer."""
        return True

    def order_sources(self) -> list[str]:
        """Return the sources of the packings that were needed so far."""
        return ["the arrays' own names"]

    def lost_elements(self) -> dict[str, int]:
        """Return parameters with missing elements, and how many are missing for each kind."""
        return {}

    @property
    def buffers(self) -> Sequence[Buffers]:
        """The parts of the state in flat gradient buffers."""
        return ()

    @property
    def shifted(self) -> Sequence[str]:
        """Parameters whose stored slots contain other elements (see `workarounds.fully_reshardable_padding`)."""
        return ()

    def slots(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """Return the slices that Megatron wrote for a tensor.

        Those of `shifted` parameters contain other elements.
        """
        return self.stored_slices(kind, name)

    def lost_intervals(self, kind: str, name: str) -> list[tuple[int, int]]:
        """Return missing elements `[first, last)` of a tensor's flattening."""
        return []
