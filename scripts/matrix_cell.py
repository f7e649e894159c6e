"""A cell of the test matrix: tests with another release of Megatron, Python or torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from environment import PYTHON, REPOSITORY, prepared, prepared_with_megatron

# Since 0.17 PyPI's wheels contain Megatron's own training loop, `megatron.training`; older ones only contain its core.
FIRST_WITH_LOOP = (0, 17)
# For the oldest Python, the oldest supported torch; for each other one, a torch that its users have.
TORCH_OF_PYTHON: dict[tuple[int, ...], str] = {(3, 10): "2.4.1", (3, 11): "2.9.1", (3, 12): "2.13.0", (3, 13): "2.15.0"}
MEGATRON = "0.19.2"
# 0.19.2 declares torch 2.6, but reads its common state with `torch.distributed.checkpoint.load(no_dist=True)`
# (megatron/core/dist_checkpointing/strategies/torch.py), an argument that 2.6 does not have.
TORCH_OF_MEGATRON = (2, 7)
# Without a GPU, Megatron cannot be imported with emerging-optimizers and torch 2.7, whose triton 3.3 looks for a GPU
# when a kernel is defined (`Autotuner.__init__`, triton/runtime/autotuner.py). That of torch 2.9 does when one runs.
TRITON, TORCH_OF_TRITON = "triton==3.5.1", (2, 9)
# Tests for releases of Megatron with a loop: hooks, saving, resuming.
LOOP_TESTS = (
    "tests/megatron", "tests/patching", "tests/jobs/test_first_step.py", "tests/jobs/test_flags.py",
    "tests/jobs/test_formats.py", "tests/jobs/test_legacy.py", "tests/jobs/test_resume.py", "tests/jobs/test_saving.py",
    "tests/jobs/test_sidecar.py", "tests/jobs/test_stock.py", "tests/jobs/test_stock_resumes.py",
    "tests/jobs/test_whole.py",
)  # fmt: skip
# Tests with the genuine DistributedOptimizer of the releases in TEST_RELEASES.
CORE_TESTS = ("tests/jobs/versions",)
# Tests for releases of Python or torch: all tests that run without Megatron.
PACKAGE_TESTS = (
    "tests/cli", "tests/formats", "tests/job", "tests/layout", "tests/model_space", "tests/operations",
    "tests/optimizers", "tests/patching", "tests/planning", "tests/selftest/test_shipped.py", "tests/storage",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """Releases from the command line; None is the test command's default.

    Attributes:
        megatron: release of megatron-core.
        python: major and minor version of Python.
        torch: release of torch.
    """

    megatron: str | None = None
    python: tuple[int, ...] | None = None
    torch: str | None = None

    @property
    def has_loop(self) -> bool:
        """True if the release's wheel contains Megatron's own training loop."""
        return self.megatron is not None and _numbers(self.megatron)[:2] >= FIRST_WITH_LOOP

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests to run, unless the command line names some."""
        if self.megatron is None:
            return PACKAGE_TESTS
        return LOOP_TESTS if self.has_loop else CORE_TESTS

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the tests."""
        return {} if self.megatron is None else {"TEST_RELEASES": self.megatron}

    def prepared(self, log: Path) -> Path:
        """Prepare an environment for the cell, and return its interpreter.

        Raises:
            SetupError: there is no suitable interpreter, or the installation failed.
        """
        if self.python is None and self.torch is None:
            base = prepared(REPOSITORY / ".venv", "demo,test,docs", log)
            if not self.has_loop or self.megatron is None:
                return base
            return prepared_with_megatron(base, REPOSITORY / f".venv-megatron-{self.megatron}", self.megatron, log)
        version = self.python or PYTHON
        torch = self.torch or TORCH_OF_PYTHON[version]
        pins = [f"torch=={torch}"]
        # The wheels of 0.17 and later are for Python 3.12 and later; without Megatron, tests that need it are skipped.
        if version >= PYTHON and _numbers(torch) >= TORCH_OF_MEGATRON:
            pins.append(f"megatron-core=={self.megatron if self.has_loop else MEGATRON}")
        name = "-".join([".venv-python" + ".".join(map(str, version)), *(pin.replace("==", "-") for pin in pins)])
        has_megatron = len(pins) > 1
        replaced = [TRITON] if has_megatron and _numbers(torch) < TORCH_OF_TRITON else []
        return prepared(
            REPOSITORY / name, "megatron-dependencies,test", log, pins=pins, replaced=replaced, version=version
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a cell."""
    cell = parser.add_argument_group("a cell of the test matrix: what depends on these releases")
    cell.add_argument("--megatron", metavar="VERSION", help="release of megatron-core, for example 0.17.1")
    cell.add_argument("--python", type=_python, metavar="VERSION", help="for example 3.10")
    cell.add_argument("--torch", metavar="VERSION", help="for example 2.6.0")


def cell_of(options: argparse.Namespace) -> Cell:
    """Return the cell that the options of a command line name."""
    return Cell(options.megatron, options.python, options.torch)


def _python(version: str) -> tuple[int, ...]:
    try:
        return _numbers(version)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{version!r} is not a version, such as 3.10") from None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
