"""The suites that are compared: a framework's files, how they run, and which tests may fail with this package."""

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
        run: runs files or tests of a checkout, with the package or without it, or a sample of each test function.
        expected: tests that may fail with the package, each with its reason: they assert the refusal that it removes.
    """

    folders: tuple[str, ...]
    run: Callable[[Path, Sequence[str], bool, int | None], dict[str, Outcome]]
    expected: Mapping[str, str]

    def files(self, checkout: Path) -> list[str]:
        """Returns the suite's files of tests, as paths from the checkout."""
        found = [path for folder in self.folders for path in sorted(_test_files(checkout / folder))]
        return [str(path.relative_to(checkout)) for path in found]


def _test_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("test_*.py"))


def _run_megatron(checkout: Path, tests: Sequence[str], with_package: bool, sample: int | None) -> dict[str, Outcome]:
    return run_megatron(Order(str(checkout), tests, with_package, sample=sample), ranks=8)


def _run_colossalai(checkout: Path, tests: Sequence[str], with_package: bool, sample: int | None) -> dict[str, Outcome]:
    return run_colossalai(Order(str(checkout), tests, with_package, sample=sample))


_OPTIMIZER = "tests/unit_tests/dist_checkpointing/test_optimizer.py"
_FINETUNE = f"{_OPTIMIZER}::TestDistributedOptimizer::test_finetune_doesnt_load_optimizer"
_REMOVED_REFUSAL = (
    'asserts the words "(TP, PP) mismatch": the package resumes under another layout, or refuses in its own words, '
    "as here, where the optimizer has never stepped"
)
MEGATRON = Suite(
    folders=("tests/unit_tests/dist_checkpointing",),
    run=_run_megatron,
    expected={
        f"{_FINETUNE}[src_tp_pp0-dest_tp_pp0-False]": _REMOVED_REFUSAL,
        f"{_FINETUNE}[src_tp_pp1-dest_tp_pp1-True]": _REMOVED_REFUSAL,
        f"{_FINETUNE}[src_tp_pp2-dest_tp_pp2-False]": _REMOVED_REFUSAL,
    },
)
COLOSSALAI = Suite(
    folders=("tests/test_zero/test_gemini", "tests/test_checkpoint_io"), run=_run_colossalai, expected={}
)
SUITES = {"megatron": MEGATRON, "colossalai": COLOSSALAI}
