"""The command line that benchmarks have in common: a folder to measure in, and numbers."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser_of(description: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Return a parser of a folder and of numbers, by their names and defaults."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("folder", type=Path)
    for name, default in numbers.items():
        found.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return found
