"""Folds long lists by grouping items that differ only in numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mcore_ckpt_ext.errors import format_bytes, quantity

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.unread_state import UnreadState

Item = TypeVar("Item")

_NUMBER = re.compile(r"\d[\d,]*")


def strip_numbers(text: str) -> str:
    """Replace every number of a text by `#`, as in `__#_#.distcp`."""
    return _NUMBER.sub("#", text)


class _UnreadRow(NamedTuple):
    """Keys that were not looked at, which differ only in numbers: in words, their size, and the reason."""

    keys: str
    size: str
    why: str
    carried: bool


def unread_rows(items: Iterable[UnreadState]) -> Iterator[_UnreadRow]:
    """Yield a row for each key; keys that differ only in numbers share one, since there may be thousands."""
    for group in group_by(items, lambda item: (item.carried, item.why, strip_numbers(item.key))):
        first = group[0]
        others = "" if len(group) == 1 else f" and {quantity(len(group) - 1, 'similar key')}"
        size = format_bytes(sum(item.nbytes for item in group))
        yield _UnreadRow(first.key + others, size, first.why or "unknown key", first.carried)


def group_by(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Group items by a key; groups are in the order of their first item."""
    groups: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())
