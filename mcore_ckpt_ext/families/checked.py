"""Released models with which each family was checked, and the first Megatron Core release for it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_name("checked.json")
"""The table by model type; `scripts/checked_models.py` writes it."""


class Checked(NamedTuple):
    """The entry of a family: the first release of Megatron Core, and the names of released models."""

    since: str
    models: tuple[str, ...]


def checked_family(model_type: str) -> Checked:
    """Return the entry of a family of this package; an empty entry for any other."""
    entry = _table().get(model_type, {"since": "", "models": []})
    return Checked(entry["since"], tuple(entry["models"]))


@cache
def _table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads(TABLE.read_text())
    return table
