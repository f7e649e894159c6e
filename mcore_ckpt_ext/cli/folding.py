"""Folds long lists by grouping items that differ only in numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Item = TypeVar("Item")

_NUMBER = re.compile(r"\d[\d,]*")


def without_numbers(text: str) -> str:
    """Replace every number of a text by `#`, as in `__#_#.distcp`."""
    return _NUMBER.sub("#", text)


def alike(items: Iterable[Item], kind: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Group items by kind; groups are in the order of their first item."""
    found: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        found[kind(item)].append(item)
    return list(found.values())
