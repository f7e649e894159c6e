"""Lists the stored keys that this package does not read.

No result may appear complete without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from mcore_ckpt_ext.lazy_torch import is_tensor
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.optimizers.flat_arrays import KINDS
from mcore_ckpt_ext.storage.tensor_reference import TensorReference

UNKNOWN = "unknown"
"""The kind of optimizer state whose kind cannot be recognized."""
OTHER = "other"
"""The kind of state that does not belong to an optimizer."""

# Keys that `save_checkpoint` writes to the common state (megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2).
COMMON_KEYS = (
    "args",
    "checkpoint_version",
    "iteration",
    "opt_param_scheduler",
    "lr_scheduler",
    "num_floating_point_operations_so_far",
    "content_metadata",
    "tokens",
)
# State for the ranks of the job that wrote it, unusable on others (megatron/core/rerun_state_machine.py, since 0.9).
RERUN_STATE = "rerun_state_machine"
_STATE = re.compile(r"^(?:chained_\d+\.)*optimizer\.(?:state\.(?P<shaped>\w+?)\..+|distributed\..+\.(?P<flat>\w+))$")
_OF_OPTIMIZER = re.compile(r"^(chained_\d+\.)*optimizer\.")
# The keys of an optimizer's entry in a common state that are read, or that describe how the rest is stored.
_READ_OF_OPTIMIZER = ("param_groups", "grad_scaler", "param_state_sharding_type", "common_step")


@dataclass(frozen=True, slots=True)
class UnreadState:
    """A key that this package does not read.

    Attributes:
        key: its name in the checkpoint's own format.
        kind: the kind of optimizer state (`momentum_buffer`), or `unknown`; `weight` for a weight of the model, `other`
            for everything else.
        nbytes: size in bytes.
        why: the known reason; empty if there is none.
        carried: whether a conversion nevertheless copies it unchanged.
    """

    key: str
    kind: str
    nbytes: int
    why: str = ""
    carried: bool = False

    @property
    def is_of_optimizer_state(self) -> bool:
        """True if the state belongs to an optimizer."""
        return is_of_optimizer(self.kind)


def is_of_optimizer(kind: str) -> bool:
    """Return whether a kind of stored array belongs to an optimizer."""
    return kind not in (WEIGHT, OTHER)


def optimizer_kind(key: str) -> str:
    """Return the kind of the array or object under a sharded key; `other` if not of an optimizer."""
    if match := _STATE.match(key):
        state = match["shaped"] or match["flat"]
        return KINDS.get(state, state)
    return UNKNOWN if _OF_OPTIMIZER.match(key) else OTHER


def unread_job_state(key: str, nbytes: int) -> UnreadState:
    """Return an entry for state that belongs to the ranks that wrote it."""
    return UnreadState(key, OTHER, nbytes, "it belongs to the ranks of the job that wrote it")


def unread_common_state(common: Mapping[str, Any], known: Iterable[str]) -> Iterator[UnreadState]:
    """Yield tensors in a common state that are not read: under unknown keys, or in the optimizer's entry."""
    for key, value in common.items():
        if key == RERUN_STATE:
            yield unread_job_state(key, sum(nbytes for _, nbytes in tensors_in(value, ())))
        elif key == "optimizer":
            yield from unread_optimizer_state(value)
        elif key not in known:
            for path, nbytes in tensors_in(value, (str(key),)):
                yield UnreadState(".".join(path), OTHER, nbytes, carried=True)


def unread_optimizer_state(entry: Any) -> Iterator[UnreadState]:
    """Yield tensors in an optimizer's entry of a common state outside its groups and its scaler."""
    for path, nbytes in tensors_in(entry, ("optimizer",)):
        if not any(part in _READ_OF_OPTIMIZER for part in path):
            yield UnreadState(".".join(path), UNKNOWN, nbytes)


def tensors_in(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the path of each tensor in nested containers, and its size in bytes."""
    if isinstance(tree, TensorReference):
        yield path, prod(tree.shape) * tree.storage.dtype.itemsize
    elif is_tensor(tree):
        yield path, tree.nbytes
    elif isinstance(tree, (Mapping, list, tuple)):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from tensors_in(value, (*path, str(key)))


def merge_entries(found: Iterable[UnreadState]) -> list[UnreadState]:
    """Merge entries with equal keys, and sum their bytes."""
    together: dict[str, UnreadState] = {}
    for item in found:
        before = together.get(item.key)
        nbytes = item.nbytes + (before.nbytes if before else 0)
        together[item.key] = replace(item, nbytes=nbytes)
    return list(together.values())
