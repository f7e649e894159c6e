"""The suites that are compared: which files of a framework, how they are run, and what may fail with this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.peers.launches import Order, run_colossalai, run_megatron
from tests.peers.results import Outcome


@dataclass(frozen=True)
class Suite:
    """Tests of a framework.

    Args:
        folders: of the checkout, or single files.
        run: runs files or tests of a checkout, with the package or without it.
        expected: tests that may fail with the package, each with its reason: they assert the refusal that it removes.
    """

    folders: tuple[str, ...]
    run: Callable[[Path, Sequence[str], bool], dict[str, Outcome]]
    expected: Mapping[str, str]

    def files(self, checkout: Path) -> list[str]:
        """Returns the suite's files of tests, as paths from the checkout."""
        found = [path for folder in self.folders for path in sorted(_test_files(checkout / folder))]
        return [str(path.relative_to(checkout)) for path in found]


def _test_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("test_*.py"))


def _run_megatron(checkout: Path, tests: Sequence[str], with_package: bool) -> dict[str, Outcome]:
    return run_megatron(Order(str(checkout), tests, with_package), ranks=8)


def _run_colossalai(checkout: Path, tests: Sequence[str], with_package: bool) -> dict[str, Outcome]:
    return run_colossalai(Order(str(checkout), tests, with_package))


MEGATRON = Suite(folders=("tests/unit_tests/dist_checkpointing",), run=_run_megatron, expected={})
COLOSSALAI = Suite(
    folders=("tests/test_zero/test_gemini", "tests/test_checkpoint_io"), run=_run_colossalai, expected={}
)
SUITES = {"megatron": MEGATRON, "colossalai": COLOSSALAI}
