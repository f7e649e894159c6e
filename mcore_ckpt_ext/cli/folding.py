"""Long lists, folded: what differs only in its numbers belongs together."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Item = TypeVar("Item")

_NUMBER = re.compile(r"\d[\d,]*")


def without_numbers(text: str) -> str:
    """Return the text with a sign in place of every number: `__#_#.distcp`."""
    return _NUMBER.sub("#", text)


def alike(items: Iterable[Item], kind: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Return the items by their kind; kinds come in the order of their first item."""
    found: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        found[kind(item)].append(item)
    return list(found.values())
