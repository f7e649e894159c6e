"""Estimates the cost of traversing a pickled state."""

from __future__ import annotations

import argparse
import collections
import types
from typing import Any

from mcore_ckpt_ext.errors import UnsafePickleError
from mcore_ckpt_ext.storage.budget import Budget
from mcore_ckpt_ext.storage.pickle_stubs import Placeholder, origin_of

# Upper limit for the elements of a common state, counted once per reference; real states have thousands.
_MOST_NODES = 1 << 30
_DEEPEST = 200


def check_expansion(tree: Any, nbytes: int, where: str) -> None:
    """Refuse a tree whose pickle has only `nbytes`, but whose traversal would never end.

    A pickle creates an object once and may refer to it many times: 50 nested lists of two references have 2**50 leaves.

    Raises:
        UnsafePickleError: the tree contains itself, or is deeper than any state of a checkpoint.
        OverBudgetError: the tree has more elements than `nbytes` can justify.
    """
    counts: dict[int, int] = {}

    def nodes(node: Any, depth: int) -> int:
        children = _children(node)
        if not children:
            return 1
        if id(node) not in counts:
            if depth > _DEEPEST:
                raise ValueError(f"deeper than {_DEEPEST} levels")
            counts[id(node)] = _MOST_NODES  # seen again before it is counted: it contains itself
            counts[id(node)] = 1 + sum(nodes(child, depth + 1) for child in children)
        if counts[id(node)] >= _MOST_NODES:
            raise ValueError(f"more than {_MOST_NODES:,} elements")
        return counts[id(node)]

    try:
        Budget(nbytes, where).spend(nodes(tree, 0), "what is referred to again and again")
    except ValueError as error:
        raise UnsafePickleError(
            "a pickled state refers to itself or is nested too deeply", found=str(error), where=where
        ) from error


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    if isinstance(node, (list, tuple, set, frozenset, collections.deque)):
        return list(node)
    if isinstance(node, Placeholder):
        origin = origin_of(node)
        return [*node.arguments, *origin.state, *origin.items, *origin.entries]
    if isinstance(node, (argparse.Namespace, types.SimpleNamespace)):
        return list(vars(node).values())
    return []
