"""With which released models each family was checked, and since which release Megatron Core builds it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_name("checked.json")
"""By model type; `scripts/checked_models.py` writes it."""


class Checked(NamedTuple):
    """The row of one family: the oldest release of Megatron Core, and the names of released models."""

    since: str
    models: tuple[str, ...]


def checked(model_type: str) -> Checked:
    """The row of a family of this package; empty for any other."""
    entry = _table().get(model_type, {"since": "", "models": []})
    return Checked(entry["since"], tuple(entry["models"]))


@cache
def _table() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(TABLE.read_text())
    return found
