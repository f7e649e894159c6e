"""Protocol of a checkpoint's optimizer state, in any format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.optimizers.flat_arrays import Buffers
from mcore_ckpt_ext.planning.plan import Derivation, StoredOnce, StoredSlice


class OptimizerState(StoredOnce, ABC):
    """The optimizer state of a checkpoint, in model space.

    `kinds`: what it stores, master and moments by name; not every parameter has every kind.
    """

    kinds: tuple[str, ...]

    @abstractmethod
    def names(self, kind: str | None = None) -> list[str]:
        """All parameters with state of one kind; by default, of any."""

    @abstractmethod
    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """The tensor as the checkpoint knows it; None where it has none of that kind and name."""

    @abstractmethod
    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """All slices that hold elements of a tensor."""

    def derivation(self, kind: str, name: str) -> Derivation | None:
        """How a tensor follows from others; None where it is stored."""
        return None

    @property
    def carried_kinds(self) -> tuple[str, ...]:
        """The kinds that together hold everything, without those from which others are derived."""
        return self.kinds

    def is_distributed(self, name: str) -> bool:
        """Whether a DistributedOptimizer, not an optimizer that keeps it whole, has a parameter's state."""
        return True

    def order_sources(self) -> list[str]:
        """Where the packings that were needed so far are known from."""
        return ["the arrays' own names"]

    def lost_elements(self) -> dict[str, int]:
        """Parameters of which the checkpoint lacks elements, and how many, for each kind."""
        return {}

    @property
    def buffers(self) -> Sequence[Buffers]:
        """The parts of it that lie in flat gradient buffers."""
        return ()

    @property
    def shifted(self) -> Sequence[str]:
        """Parameters whose stored slots hold other elements (see `workarounds.fully_reshardable_padding`)."""
        return ()

    def slots(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """The slices that Megatron wrote as those of a tensor; for what is `shifted` they hold other elements."""
        return self.stored(kind, name)

    def lost(self, kind: str, name: str) -> list[tuple[int, int]]:
        """Elements `[first, last)` of a tensor's flattening that are stored nowhere."""
        return []
