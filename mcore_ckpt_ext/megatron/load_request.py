"""Finds and replaces the optimizers that a sharded state dict requests, in a tree of any shape.

`dist_checkpointing.load` takes a dict in which dicts and lists may be nested, or the optimizer's own dict as the root,
and returns the loaded dict, or with some values of `strict` a tuple of it and two sets of keys
(`load`, megatron/core/dist_checkpointing/serialization.py; `StrictHandling`, validation.py; core_v0.12.1 to 0.19.2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mcore_ckpt_ext.continuity.order_change import DataOrder
from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.megatron.trees import items_of, leaves
from mcore_ckpt_ext.optimizer_reshard import Prepared
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex

TreePath = tuple[Any, ...]
"""Keys and positions from the root of a tree to one of its nodes; empty for the root."""


class LoadRequest(dict[Any, Any]):
    """The sharded state dict of an optimizer that is to be loaded, with the optimizer."""

    optimizer: Any


class LoadPlan(dict[Any, Any]):
    """The plan to fill an optimizer, in place of the optimizer's state in the loaded state dict."""

    prepared: Prepared
    order: DataOrder


def requests_in(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, LoadRequest]]:
    """Yield the optimizers that a sharded state dict requests, with paths; of a chain the outermost."""
    if isinstance(tree, LoadRequest):
        yield path, tree
    elif isinstance(tree, (dict, list)):
        for key, value in items_of(tree):
            yield from requests_in(value, (*path, key))


def check_lists(tree: Any, planned: Collection[TreePath], path: TreePath = ()) -> None:
    """Refuse a list that mixes planned optimizers with others, since Megatron merges lists by position.

    Source: `merge` and `extract_matching_values`, megatron/core/dist_checkpointing/dict_utils.py, core_v0.12.1 to
    0.19.2: removing an element from a list shifts all elements behind it.

    Raises:
        UnsupportedCheckpointError: only some elements of a list are planned.
    """
    if not isinstance(tree, (dict, list)) or path in planned:
        return
    children = {(*path, key): value for key, value in items_of(tree)}
    if not isinstance(tree, dict):
        within = [any(planned_path[: len(child)] == child for planned_path in planned) for child in children]
        if any(within) and not all(within):
            raise UnsupportedCheckpointError(
                "a list of the state dict mixes optimizers that Megatron can load with others that it cannot",
                found=f"{sum(within)} of {quantity(len(within), 'element')} that it cannot load, at {_describe(path)}",
                hint="give each optimizer a key of its own, as in {'first': ..., 'second': ...}",
            )
    for child, value in children.items():
        check_lists(value, planned, child)


def without(tree: Any, planned: Collection[TreePath], path: TreePath = ()) -> Any:
    """Return a copy of the tree without the nodes at some paths; only their parents are copied."""
    if path in planned:
        return {}
    if not isinstance(tree, (dict, list)) or not any(planned_path[: len(path)] == path for planned_path in planned):
        return tree
    kept = {key: without(value, planned, (*path, key)) for key, value in items_of(tree) if (*path, key) not in planned}
    return kept if isinstance(tree, dict) else list(kept.values())


def with_plans(result: Any, plans: Mapping[TreePath, LoadPlan]) -> Any:
    """Insert each plan at its path into the result of `load`; in a tuple, the loaded dict comes first.

    Keys of optimizers are removed from the sets of missing and unexpected keys: the plans cover them.
    """
    if isinstance(result, tuple):
        loaded, *keys = result
        return (with_plans(loaded, plans), *(_drop_optimizer(key_set) for key_set in keys))
    for path, plan in plans.items():
        result = _with_plan(result, path, plan)
    return result


def is_stored_alike(request: Any, index: DcpIndex) -> bool:
    """Return True if a checkpoint has all arrays of a request in equal sizes, as Megatron requires.

    Source: `ShardedTensor.global_shape`, megatron/core/dist_checkpointing/mapping.py; if it differs, Megatron fails
    with "Global shape mismatch" (strategies/torch.py, core_v0.12.1 to 0.19.2).
    """
    return all(
        tensor.key in index.arrays and tuple(tensor.global_shape) == tuple(index.arrays[tensor.key].shape)
        for tensor in leaves(request)
        if hasattr(tensor, "global_shape") and hasattr(tensor, "local_shape")
    )


def _with_plan(tree: Any, path: TreePath, plan: LoadPlan) -> Any:
    """Insert a plan at a path of the loaded tree; a list that was emptied is extended as needed."""
    if not path:
        if isinstance(tree, dict):  # values of the common state
            plan.update(tree)
        return plan
    key, *rest = path
    if isinstance(tree, list):
        tree.extend({} for _ in range(key + 1 - len(tree)))
        tree[key] = _with_plan(tree[key], tuple(rest), plan)
    else:
        tree[key] = _with_plan(tree.get(key, {}), tuple(rest), plan)
    return tree


def _drop_optimizer(keys: Any) -> Any:
    """Remove the keys of optimizers (`sharded_state_dict`, megatron/core/optimizer, 0.12.1 to 0.19.2)."""
    return type(keys)(key for key in keys if not str(key).startswith(("optimizer.", "chained_")))


def _describe(path: TreePath) -> str:
    return "".join(f"[{key!r}]" for key in path) or "the root"
