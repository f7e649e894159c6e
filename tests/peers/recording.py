"""Pytest plugin that records every test of a rank, in step with the other ranks; only ranks import it.

A rank that fails leaves the others waiting in a collective, and later tests out of step. So all ranks meet after every
test: if they disagree, or some do not arrive, the launch ends, and the next one continues after that test.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Callable, Collection, Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from results import FAILED, PASSED, SKIPPED, sampled  # type: ignore[attr-defined]
from torch.distributed import DistStoreError, FileStore  # type: ignore[attr-defined]

_GRACE = timedelta(seconds=10)
"""For ranks that did not fail: they usually wait for the one that did."""
_OUT_OF_STEP = 3


class Recorder:
    """Writes `rank<N>.jsonl`: a line when a test starts, and one with its outcome when it has ended.

    Args:
        folder: of this launch, shared by its ranks.
        rank: this rank.
        ranks: their number.
        limit: seconds for one test; then the rank prints its stacks and exits. None in a process that forks: the
            watchdog is a thread, which a child would wait for.
        done: tests that earlier launches have run.
        most: tests that this launch runs (default: all).
        after_each: called when a test has ended on all ranks.
        sample: of each test function, run at most so many parameter sets; None runs all.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        *,
        limit: float | None,
        done: Collection[str] = (),
        most: int | None = None,
        after_each: Callable[[], None] = lambda: None,
        sample: int | None = None,
    ) -> None:
        self._folder, self._rank, self._ranks = folder, rank, ranks
        self._done, self._most, self._limit, self._after_each = frozenset(done), most, limit, after_each
        self._lines = (folder / f"rank{rank}.jsonl").open("a", buffering=1)
        self._store: Any = FileStore(str(folder / "store"), ranks)
        self._outcome, self._message, self._met = PASSED, "", 0
        self._sample = sample

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the first tests that have not been run yet."""
        if self._sample is not None:
            chosen = sampled([item.nodeid for item in items], self._sample)
            items[:] = [item for item in items if item.nodeid in chosen]
        if self._rank == 0:
            (self._folder / "collected.json").write_text(json.dumps([item.nodeid for item in items]))
        items[:] = [item for item in items if item.nodeid not in self._done][: self._most]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that cannot be imported, or is skipped as a whole, as if it were a test."""
        if report.failed or report.skipped:
            self._write(test=report.nodeid)
            state = FAILED if report.failed else SKIPPED
            self._write(test=report.nodeid, outcome=state, message=str(report.longrepr)[:2000])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record a test from its setup to its teardown, then meet the other ranks."""
        self.start(item.nodeid)
        result = yield
        self.end(item.nodeid, self._outcome, self._message)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take up what a phase of the test came to; a failure in any of them is one of the test."""
        if report.failed and self._outcome != FAILED:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._outcome, self._message = FAILED, str(crash.message if crash else report.longrepr)
        elif report.skipped and self._outcome == PASSED:
            self._outcome = SKIPPED

    def start(self, test: str) -> None:
        """Record that a test starts, and start its time."""
        self._outcome, self._message = PASSED, ""
        self._write(test=test)
        self.restart()

    def restart(self) -> None:
        """Start the time of what runs now."""
        if self._limit is not None:
            faulthandler.dump_traceback_later(self._limit, exit=True)

    def end(self, test: str, outcome: str, message: str) -> None:
        """Record how a test ended here; return when it ended alike on all ranks, else end this process."""
        if self._limit is not None:
            faulthandler.cancel_dump_traceback_later()
        self._write(test=test, outcome=outcome, message=message[:2000])
        keys = [f"{self._met}/{rank}" for rank in range(self._ranks)]
        self._met += 1
        self._store.set(keys[self._rank], outcome)
        try:
            self._store.wait(keys, _GRACE if outcome == FAILED else timedelta(seconds=self._limit or 0))
        except DistStoreError:
            os._exit(_OUT_OF_STEP)
        if len({self._store.get(key) == FAILED.encode() for key in keys}) > 1:
            os._exit(_OUT_OF_STEP)
        self._after_each()

    def _write(self, **line: str) -> None:
        self._lines.write(json.dumps(line) + "\n")
