"""Gives results a `repr` that fits on a screen."""

from __future__ import annotations

import dataclasses
from reprlib import Repr
from typing import Any


class _Abbreviated(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = 2
        self.maxstring = self.maxother = 80


class ShortRepr:
    """A dataclass whose `repr` abbreviates each field; the fields themselves are complete."""

    def __repr__(self) -> str:
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(self)  # type: ignore[arg-type]
        abbreviated = _Abbreviated()
        shown = (f"{field.name}={abbreviated.repr(getattr(self, field.name))}" for field in fields)
        return f"{type(self).__name__}({', '.join(shown)})"
