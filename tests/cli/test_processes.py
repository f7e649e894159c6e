"""Test processes that share a command: if one is killed or stopped, the others end and name it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.harness.checkpoints import fixture_named
from tests.harness.joined import in_processes

pytestmark = pytest.mark.thorough

SECONDS = 3
RUN = fixture_named("p02").run


@pytest.mark.parametrize(
    ("words", "lost", "own_signal"),
    [
        (["verify", RUN], 1, signal.SIGKILL),
        (["diff", RUN, RUN], 0, signal.SIGSTOP),
        (["plan", RUN, "--gpus", 2, "--rehearse", "tp=2"], 0, signal.SIGKILL),
        (["convert", RUN, "out", "--to", "torch_dist"], 2, signal.SIGSTOP),
    ],
    ids=["verify-killed", "diff-first-stopped", "plan-first-killed", "convert-stopped"],
)
def test_a_lost_process_ends_the_others_which_name_it(
    words: list[object], lost: int, own_signal: signal.Signals, tmp_path: Path
) -> None:
    """The first process holds the store at which they meet, so its loss is another case."""
    words = [tmp_path / word if word == "out" else word for word in words]
    timeout = {"MCORE_CKPT_EXT_HEARTBEAT_TIMEOUT": str(SECONDS)}
    ended = in_processes(3, tmp_path, *words, lost={lost: own_signal}, environment=timeout)
    for rank, process in enumerate(ended):
        if rank != lost:
            assert process.exit_code == 2, process.output
            assert f"process {lost} on " in process.output
            assert f"(pid {ended[lost].pid})" in process.output
    assert not (tmp_path / "out").exists()
