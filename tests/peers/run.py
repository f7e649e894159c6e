"""Runs a framework's own tests with this package and without it, and prints the differences.

    python -m tests.peers.run megatron /path/to/Megatron-LM
    python -m tests.peers.run colossalai /path/to/ColossalAI
    python -m tests.peers.run megatron /path/to/Megatron-LM tests/unit_tests/dist_checkpointing/test_optimizer.py

Run it in the root of this repository and the environment of the framework. Launches follow one another; a test that
hangs ends at its time limit and counts as unfinished. Tests that differ run again, each in its own launch, and count
only if they differ again. The exit status is 1 if a test breaks that is not listed in `suites.py`.

Megatron's tests that need Transformer Engine or nvidia-resiliency-ext fail at once, or are skipped, without them. The
variable MEGATRON_ON_CPU_TRANSFORMER_ENGINE names a folder with the Python part of the former (`pip install --no-deps
--target FOLDER transformer-engine`), PYTHONPATH one with the latter.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from tests.peers.results import CASE, Comparison, Outcome
from tests.peers.suites import SUITES, Suite


class Campaign:
    """Both runs of a suite.

    Args:
        suite: of which framework.
        checkout: of the framework.
        log: receives all outcomes as JSON, after every file.
        sample: of each test function, run at most so many parameter sets; None runs all.
    """

    def __init__(self, suite: Suite, checkout: Path, log: Path | None = None, sample: int | None = None) -> None:
        self._suite, self._checkout, self._log, self._sample = suite, checkout, log, sample
        self._without: dict[str, Outcome] = {}
        self._with: dict[str, Outcome] = {}

    def compare(self, tests: Sequence[str], only_failures: bool = False) -> Comparison:
        """Run tests both ways, and once more what differs.

        Args:
            tests: files or tests of the checkout; without any, the files of the suite.
            only_failures: run without the package only what fails with it, which halves the time.
        """
        for test in tests or self._suite.files(self._checkout):
            found = self._run([test], with_package=True)
            failures = _tests_of(test for test, outcome in found.items() if outcome.is_bad)
            if failures or not only_failures:
                self._run(failures if only_failures else [test], with_package=False)
        differing = self._comparison
        for test in _tests_of([*differing.broken, *differing.mended]):
            for with_package in (True, False):
                self._run([test], with_package)
        return self._comparison

    @property
    def _comparison(self) -> Comparison:
        return Comparison(dict(self._without), dict(self._with), self._suite.expected)

    def _run(self, tests: Sequence[str], with_package: bool) -> dict[str, Outcome]:
        started = time.monotonic()
        found = self._suite.run(self._checkout, tests, with_package, self._sample)
        (self._with if with_package else self._without).update(found)
        bad = sum(outcome.is_bad for outcome in found.values())
        how, first = "with   " if with_package else "without", tests[0] if len(tests) == 1 else f"{tests[0]}, ..."
        print(f"{how} {len(found):4} tests, {bad:4} failed, {time.monotonic() - started:4.0f} s: {first}", flush=True)
        if self._log is not None:
            both = {"without": self._without, "with": self._with}
            texts = {how: {test: asdict(one) for test, one in outcomes.items()} for how, outcomes in both.items()}
            self._log.write_text(json.dumps(texts, indent=1))
        return found


def _tests_of(cases: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(case.partition(CASE)[0] for case in cases))


def main() -> int:
    """Print the comparison; the exit status is 1 if something unexpected differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers.run", description=__doc__.partition("\n")[0])
    parser.add_argument("framework", choices=SUITES)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("tests", nargs="*", help="files or tests of the checkout (default: those of the suite)")
    parser.add_argument("--only-failures", action="store_true", help="run without the package only what fails with it")
    parser.add_argument("--sample", type=int, help="of each test function, run at most so many parameter sets")
    parser.add_argument("--log", type=Path, help="file for all outcomes, as JSON")
    options = parser.parse_intermixed_args()
    campaign = Campaign(SUITES[options.framework], options.checkout.resolve(), options.log, options.sample)
    found = campaign.compare(options.tests, options.only_failures)
    print("", found.table(), sep="\n")
    return 1 if found.unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
