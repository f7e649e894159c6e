"""Lists the stored keys that this package does not read, so that no result passes for complete."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from mcore_ckpt_ext.lazy_torch import is_tensor
from mcore_ckpt_ext.optimizers.flat_arrays import KINDS
from mcore_ckpt_ext.storage.tensor_reference import TensorReference

UNKNOWN = "unknown"
"""The kind of optimizer state of which not even the kind is known."""
OTHER = "other"
"""The kind of what belongs to no optimizer."""

# What `save_checkpoint` puts into the common state (megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2).
COMMON_KEYS = (
    "args", "checkpoint_version", "iteration", "opt_param_scheduler", "lr_scheduler",
    "num_floating_point_operations_so_far", "content_metadata", "tokens",
)  # fmt: skip
# State of the writing job's own ranks, which means nothing to others (megatron/core/rerun_state_machine.py, since 0.9).
RERUN_STATE = "rerun_state_machine"
_STATE = re.compile(r"^(?:chained_\d+\.)*optimizer\.(?:state\.(?P<shaped>\w+?)\..+|distributed\..+\.(?P<flat>\w+))$")
_OF_OPTIMIZER = re.compile(r"^(chained_\d+\.)*optimizer\.")
# The keys of an optimizer's entry in a common state that are read, or that say how the rest is stored.
_READ_OF_OPTIMIZER = ("param_groups", "grad_scaler", "param_state_sharding_type", "common_step")


@dataclass(frozen=True, slots=True)
class UnreadState:
    """A key that nothing here reads.

    Attributes:
        key: as the checkpoint's own format has it.
        kind: the kind of optimizer state (`momentum_buffer`), or `unknown`; `other` for everything else.
        nbytes: size in bytes.
        why: what is known about it; empty where nothing is.
        carried: whether a conversion carries it over all the same, as it is.
    """

    key: str
    kind: str
    nbytes: int
    why: str = ""
    carried: bool = False

    @property
    def of_optimizer(self) -> bool:
        """Whether the state belongs to an optimizer."""
        return self.kind != OTHER


def optimizer_kind(key: str) -> str:
    """The kind of the array or object under a sharded key; `other` where it is no optimizer's."""
    if match := _STATE.match(key):
        state = match["shaped"] or match["flat"]
        return KINDS.get(state, state)
    return UNKNOWN if _OF_OPTIMIZER.match(key) else OTHER


def of_the_job(key: str, nbytes: int) -> UnreadState:
    """State that belongs to the ranks that wrote it."""
    return UnreadState(key, OTHER, nbytes, "it belongs to the ranks of the job that wrote it")


def in_common_state(common: Mapping[str, Any], known: Iterable[str]) -> Iterator[UnreadState]:
    """Tensors in a common state other than the known ones, and other than what is read of the optimizer's entry."""
    for key, value in common.items():
        if key == RERUN_STATE:
            yield of_the_job(key, sum(nbytes for _, nbytes in tensors_in(value, ())))
        elif key == "optimizer":
            yield from in_optimizer(value)
        elif key not in known:
            for path, nbytes in tensors_in(value, (str(key),)):
                yield UnreadState(".".join(path), OTHER, nbytes, carried=True)


def in_optimizer(entry: Any) -> Iterator[UnreadState]:
    """Tensors in an optimizer's entry of a common state that are neither its groups nor its scaler."""
    for path, nbytes in tensors_in(entry, ("optimizer",)):
        if not any(part in _READ_OF_OPTIMIZER for part in path):
            yield UnreadState(".".join(path), UNKNOWN, nbytes)


def tensors_in(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The tensors in nested containers: where each is, and its size in bytes."""
    if isinstance(tree, TensorReference):
        yield path, prod(tree.shape) * tree.storage.dtype.itemsize
    elif is_tensor(tree):
        yield path, tree.nbytes
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tensors_in(value, (*path, str(key)))
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from tensors_in(value, (*path, str(number)))


def joined(found: Iterable[UnreadState]) -> list[UnreadState]:
    """Each key once, with the bytes of all the places where it was found."""
    together: dict[str, UnreadState] = {}
    for item in found:
        before = together.get(item.key)
        nbytes = item.nbytes + (before.nbytes if before else 0)
        together[item.key] = replace(item, nbytes=nbytes)
    return list(together.values())
