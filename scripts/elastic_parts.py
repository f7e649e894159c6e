"""The parts of the time between a node's death, or its return, and the next step, from the lines of agents and workers.

The workers need the plugin `elastic_marks.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

MARKS = Path(__file__).with_name("elastic_marks.py")
# The parts in turn, and what ends each. The lines without marks are torch's, at the level INFO
# (torch/distributed/elastic/agent/server/api.py, torch 2.13), and Megatron's.
PARTS = {
    "noticing": r"will restart worker group",
    "stop and rendezvous": r"Starting worker group",
    "imports": r"\[mark\] choice begins",
    "choice": r"\[mark\] choice ends",
    "model and optimizer": r"\[mark\] load begins",
    "load": r"\[mark\] load ends",
    "first step": r"iteration +\d+/ *\d+ ",
}
OF_PACKAGE = ("choice", "load")
"""The parts in which this package works."""


def seconds_of_parts(timeline: Sequence[tuple[float, str]], event: str) -> dict[str, float]:
    """Return the seconds of each part after an event.

    Args:
        timeline: lines with the times of their arrival.
        event: what `elastic_agents` has done, like `SIGKILL 1`.

    Raises:
        ValueError: the lines have no such event, or no end of a part after it.
    """
    rest = iter(timeline)
    time = _next_time(rest, re.escape(f"[agents] {event}") + "$")
    seconds = {}
    for part, pattern in PARTS.items():
        end = _next_time(rest, pattern)
        seconds[part] = end - time
        time = end
    return seconds


def _next_time(rest: Iterator[tuple[float, str]], pattern: str) -> float:
    for time, line in rest:
        if re.search(pattern, line):
            return time
    raise ValueError(f"no line matches {pattern}")


def share_of_package(seconds: Mapping[str, float]) -> float:
    """Return the share of the choice and the load in the whole time."""
    return sum(seconds[part] for part in OF_PACKAGE) / sum(seconds.values())
