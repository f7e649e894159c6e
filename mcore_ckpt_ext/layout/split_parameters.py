"""Parameters that are stored in parts, each under a key of its own: a Mamba mixer's `in_proj` and `conv1d`.

Source: `MambaMixer.sharded_state_dict` (megatron/core/ssm/mamba_mixer.py, core_v0.9.0 to 0.19.2), which splits a
rank's rows into z, x, B, C, dt (`in_proj.weight`) or x, B, C (`conv1d`), because each is cut between tensor-parallel
ranks by itself. In memory, and in the gradient buffer, the parts follow each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_PARTS = ("z", "x", "B", "C", "dt")
_PART = re.compile(rf"^(.*\.mixer\.(?:in_proj|conv1d)\.(?:weight|bias))\.({'|'.join(_PARTS)})$")


def split_parameters(names: Iterable[str]) -> dict[str, list[str]]:
    """The names of all parts of each split parameter, in the order of its memory, by the name of the first part."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        if match := _PART.match(name):
            found.setdefault(match[1], {})[match[2]] = name
    parts = [[by_part[part] for part in _PARTS if part in by_part] for by_part in found.values()]
    return {names[0]: names for names in parts}
