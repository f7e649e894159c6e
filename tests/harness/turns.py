"""Several real Megatron-LM jobs in one launch, one after the other, and their results.

A job costs less than starting its ranks. All jobs must have the same number of ranks, but may have different layouts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import FOLDER_VARIABLE
from megatron_on_cpu.record_losses import FILE_VARIABLE

from tests.harness.checkouts import checkout_job, version
from tests.harness.jobs import RANK_SCRIPTS, SAVED, TIME_LIMIT, Job, described, finished
from tests.harness.layouts import Layout

STARTS, ENDS = "=== begins: ", "=== ended with code "


class Turn:
    """One job."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        *,
        saves: bool = False,
        until: int = SAVED + 1,
        environment: Mapping[str, str] | None = None,
        stock: bool = False,
        newest: int = SAVED,
        commands: Sequence[Sequence[str]] = (),
        **options: Any,
    ) -> None:
        """Describe the job.

        Args:
            folder: its folder.
            layout: its parallel layout.
            saves: whether it saves.
            until: its last iteration.
            environment: temporary environment variables.
            stock: whether it runs without this package; jobs that save must precede it, because wrappers are not
                restored.
            newest: the iteration of the newest checkpoint of a job that saves, even if training continues.
            commands: commands of `mcore-ckpt` that the first rank runs before it.
            options: options of `run_job`: `load` (possibly the run of an earlier turn), `more`, `optimizer`,
                `precision`.
        """
        self.folder, self.layout = folder, layout
        arguments, recording = described(folder, layout, saves=saves, until=until, **options)
        tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
        self.order = {
            "name": folder.name,
            "arguments": arguments,
            "environment": {**recording, **(environment or {})},
            "stock": stock,
            "commands": [list(map(str, words)) for words in commands],
            "newest": {str(tracker): str(newest)} if saves else {},
        }


class Results(dict[str, launch.RunResult]):
    """How each job ended, by the name of its folder.

    Attributes:
        of_checkout: whether a checkout ran.
        megatron: the version that ran, major and minor.
    """

    def __init__(self, turns: Sequence[Turn], of_checkout: bool) -> None:
        super().__init__()
        self.of_checkout = of_checkout
        self.megatron = version() if of_checkout else "0.19"
        self._turns = {turn.folder.name: turn for turn in turns}

    def folder(self, name: str) -> Path:
        """Return the folder of a job."""
        return self._turns[name].folder

    def job(self, name: str) -> Job:
        """Return a job, which must have succeeded."""
        turn = self._turns[name]
        return finished(turn.folder, turn.layout, self[name])


def run_in_turn(
    folder: Path, turns: Sequence[Turn], plugins: Sequence[Path] = (), *, of_checkout: bool = False
) -> Results:
    """Run the jobs, one after the other; a job that fails with this package must fail on all of its ranks.

    `of_checkout`: whether to use the Megatron-LM that MEGATRON_LM_PATH names, and its own script.
    """
    script = {"TEST_SCRIPT": str(checkout_job()["script"])} if of_checkout else {}
    order = folder / "order.json"
    order.write_text(json.dumps([turn.order for turn in turns]))
    (ranks,) = {turn.layout.ranks for turn in turns}
    unused = str(folder / "unused")
    result = launch.run(
        ranks,
        RANK_SCRIPTS / "jobs_in_turn.py",
        [],
        timeout=TIME_LIMIT + 60 * len(turns),
        megatron=checkout_job()["megatron"] if of_checkout else None,
        environment={**script, "TEST_ORDER": str(order), FILE_VARIABLE: unused, FOLDER_VARIABLE: unused},
        plugin_files=plugins,
        log_file=folder / "log",
    )
    assert result.returncode == 0, result.output[-6000:]
    results = Results(turns, of_checkout)
    results.update(_by_name(result, {turn.folder.name for turn in turns if turn.order["stock"]}))
    assert results.keys() == {turn.folder.name for turn in turns}
    return results


def _by_name(result: launch.RunResult, of_stock: Collection[str]) -> dict[str, launch.RunResult]:
    """Return the output of the ranks in each turn, one rank after the other, and the exit code.

    `of_stock`: turns without this package, in which only some ranks may have failed.
    """
    printed: defaultdict[str, defaultdict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    codes: defaultdict[str, set[int]] = defaultdict(set)
    turn_of: dict[int, str] = {}
    for line in result.output.splitlines(keepends=True):
        if not (mark := launch.RANK_OF_LINE.match(line)):
            continue
        rank, text = int(mark[1]), line[mark.end() :]
        if text.startswith(STARTS):
            turn_of[rank] = text.removeprefix(STARTS).strip()
        elif text.startswith(ENDS):
            codes[turn_of.pop(rank)].add(int(text.removeprefix(ENDS)))
        elif rank in turn_of:
            printed[turn_of[rank]][rank].append(line)
    results = {}
    for name, of_ranks in printed.items():
        code, *others = sorted(codes[name], reverse=True)
        assert not others or name in of_stock, f"{name} ended with {codes[name]}"
        lines = [line for _, own in sorted(of_ranks.items()) for line in own]
        results[name] = launch.RunResult(code, "".join(lines), result.seconds)
    return results
