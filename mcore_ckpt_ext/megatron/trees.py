"""Walks through state dicts, in which Megatron nests dicts and lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def items_of(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys or positions of a dict or list, with their values."""
    return iter(tree.items() if isinstance(tree, dict) else enumerate(tree))


def leaves(tree: Any) -> Iterator[Any]:
    """Yield everything in a tree that is neither a dict nor a list."""
    if isinstance(tree, (dict, list)):
        for _, value in items_of(tree):
            yield from leaves(value)
    else:
        yield tree
