"""The command line that benchmarks have in common: a folder to measure in, and numbers."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path


def parser_of(description: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Return a parser of a folder and of numbers, by their names and defaults."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("folder", type=Path)
    for name, default in numbers.items():
        found.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return found


def print_medians(seconds: Mapping[str, Sequence[float]], memory: Mapping[str, float]) -> dict[str, float]:
    """Print a row for each thing that was measured, and return the medians.

    Args:
        seconds: the seconds of each run, by what was measured.
        memory: the bytes of memory at the peak, where they are known.
    """
    medians = {what: statistics.median(values) for what, values in seconds.items()}
    for what, median in medians.items():
        peak = f"{memory[what] / 2**20:.0f} MiB" if what in memory else ""
        print(f"| {what} | {median:.1f} s | {min(seconds[what]):.1f} to {max(seconds[what]):.1f} s | {peak} |")
    return medians
