"""Names members of Megatron's enumerations, which checkpoints store by number."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from mcore_ckpt_ext.storage.pickle_stubs import Placeholder

_MEMBERS: Mapping[str, tuple[str, ...]] = {"AttnBackend": ("flash", "fused", "unfused", "local", "auto")}
"""The names of members from number 1 on, by class (megatron/core/transformer/enums.py, core_v0.9.0 to 0.19.2)."""


def as_passed(value: Any) -> Any:
    """Return the value of an argument as a user passes it: an object as text."""
    if isinstance(value, (list, tuple)):
        return [as_passed(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Placeholder):
        return _member_of(value) or str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _member_of(value: Placeholder) -> str | None:
    members = _MEMBERS.get(value.pickled_name, ())
    number = value.arguments[0] if len(value.arguments) == 1 else None
    return members[number - 1] if type(number) is int and 1 <= number <= len(members) else None
