"""Jobs that save in the background, with failures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_on_cpu import launch, toy_jobs

from mcore_ckpt_ext.operations.iteration_health import problems_of
from tests.harness.jobs import RANK_SCRIPTS, TIME_LIMIT

RANKS = 4
# Exactly the flags of existing scripts.
ASYNCHRONOUS = ("--use-dist-ckpt", "--async-save")
DURABLE = re.compile(
    r"iteration (?P<iteration>\d+) is complete on disk: (?P<megabytes>[\d.,]+) MB in (?P<folder>\S+), "
    r"training stalled (?P<stalled>[\d.]+) s, (?P<background>[\d.]+) s in the background"
)

CAUSES = {
    "SIGKILL": r"rank 1: its writer \(pid \d+\) was killed by SIGKILL",
    "raise": r"rank 1: .*ValueError: the writer has lost its pencil",
    "full": r"rank 1: .*\[Errno 28\] No space left on device",
    "vanish": r"No such file or directory",
    "SIGSTOP": r"rank 0: its writer \(pid \d+\) has not moved for \d+ s: stopped by a signal",
    "mute": r"rank 1: .*(EOFError|ConnectionRefusedError|ConnectionResetError|BrokenPipeError)",
    "lose": r"__1_0\.distcp: it does not exist, but its records need [\d,]+ bytes",
}
"""The messages for a failure of `ranks/trouble.py`, with the rank that it affects."""


def run_saving(
    folder: Path,
    iterations: int,
    *,
    ranks: int = RANKS,
    interval: int = 2,
    save: Path | None = None,
    load: Path | None = None,
    trouble: Mapping[int, Mapping[str, Any]] | None = None,
    more: Sequence[str] = ASYNCHRONOUS,
    environment: Mapping[str, str] | None = None,
    script: Path | str = launch.TRAIN_GPT,
    megatron: Path | None = None,
    plugins: Sequence[Path] = (),
) -> launch.RunResult:
    """Train a tiny GPT with pipeline parallelism, saving every few iterations, and return the result."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = toy_jobs.tiny_gpt(
        1,
        2,
        iterations=iterations,
        save=save or folder / "checkpoints",
        save_interval=interval,
        load=load,
        more=["--make-vocab-size-divisible-by", "128", *more],
    )
    troubles = {"TEST_TROUBLE": json.dumps(trouble or {}), "TEST_RANK_SCRIPTS": str(RANK_SCRIPTS)}
    return launch.run(
        ranks,
        script,
        arguments,
        timeout=TIME_LIMIT,
        megatron=megatron,
        environment={**troubles, **(environment or {})},
        plugin_files=[*plugins, RANK_SCRIPTS / "trouble.py"],
        log_file=folder / "log",
    )


def run_held(folder: Path, **options: Any) -> launch.RunResult:
    """Run with saves at iterations 4, 8 and 12; no writer of 8 starts before iteration 11, or the job never ends."""
    held = {2: {"ranks": list(range(RANKS)), "what": "hold 3"}}
    return run_saving(folder, 12, interval=4, trouble=held, **options)


def assert_trained_meanwhile(output: str) -> None:
    """Check that iteration 11 was trained between the scheduling of iteration 8 and its completion."""
    words = ("scheduled an async checkpoint save at iteration       8", "iteration       11/", "iteration 8 is comp")
    places = [output.index(word) for word in words]
    assert places == sorted(places)


def durable_lines(output: str) -> dict[int, re.Match[str]]:
    """Return the lines that report a complete checkpoint on disk, by iteration; rank 0 prints one for each."""
    found = [match for line in output.splitlines() if line.startswith("[rank 0]") and (match := DURABLE.search(line))]
    assert len({match["iteration"] for match in found}) == len(found) == output.count("is complete on disk")
    return {int(match["iteration"]): match for match in found}


def iterations_in(run: Path) -> list[int]:
    """Return the iteration folders of a run."""
    return sorted(int(path.name.removeprefix("iter_")) for path in run.glob("iter_*"))


def tracked(run: Path) -> int:
    """Return the iteration in the tracker file."""
    return int((run / "latest_checkpointed_iteration.txt").read_text())


def assert_told(output: str, iteration: int, cause: str) -> None:
    """Check that one line reports the failure of a save and its cause, in a job that continues."""
    form = re.compile(rf"\[mcore_ckpt_ext\] iteration {iteration} (was not|cannot be) saved")
    lines = [line for line in output.splitlines() if form.search(line)]
    assert len(lines) == 1, output[-6000:]
    assert re.search(cause, lines[0]), lines[0]
    assert lines[0].endswith("training goes on, the next checkpoint will be tried as planned")


def assert_whole(output: str, run: Path, iterations: Sequence[int]) -> None:
    """Check that these iterations were reported as complete, and are; the tracker file names the last."""
    assert sorted(durable_lines(output)) == list(iterations)
    assert tracked(run) == iterations[-1]
    assert [problems_of(run / f"iter_{number:07d}") for number in iterations] == [()] * len(iterations)
