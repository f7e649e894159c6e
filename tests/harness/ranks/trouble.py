"""Plugin: causes failures in saves. `TEST_TROUBLE` is JSON: by the number of the save, from 1, `ranks` and `what`.

In the writer process, before it writes: `hold STEPS` waits until training has done this number of steps; `raise`,
`SIGKILL`, `SIGSTOP`; with `preload`, before it has copied a tensor. In the training process: `full` puts the rank's
file on a full disk, `vanish` removes the folder once the writer has its order, `idle` kills the writer, `lose` removes
its file and `mute` kills the manager of its results once it is done, `bar` blocks the new tracker file and `clear`
unblocks it, `end` kills the writer when it is dismissed, and `kill rank|writer|all SECONDS` kills after this delay.
With `finish`, all ranks wait at once until all is written, with `settle` also for the outcome.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(os.environ["TEST_RANK_SCRIPTS"])))

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
from megatron.training import async_utils, checkpointing, get_args, training
from troubled_writing import troubled

TROUBLE = {int(number): trouble for number, trouble in json.loads(os.environ["TEST_TROUBLE"]).items()}
RANK = int(os.environ["RANK"])
_IN_WRITER = ("wait", "raise", "SIG")
steps_until_release: dict[Path, int] = {}


def install() -> None:
    """Wrap the scheduling that `save_checkpoint` calls."""
    original, step, saves = checkpointing.schedule_async_save, training.train_step, []

    @functools.wraps(original)
    def schedule(request: Any) -> Any:
        saves.append(request)
        results = filesystem_async._results_queue
        if async_utils.is_empty_async_queue() and results is not None and results.qsize():
            print(f"save {len(saves)} begins with {results.qsize()} results of another", flush=True)
        trouble = TROUBLE.get(len(saves), {"ranks": [], "what": ""})
        what = trouble["what"] if RANK in trouble["ranks"] else ""
        result = original(prepared(request, what, with_preload=bool(trouble.get("preload"))))
        disturb_folder(what)
        disturb_writer(what)
        while trouble.get("finish") and not async_utils.is_empty_async_queue():
            async_utils.maybe_finalize_async_save(blocking=False)
        if trouble.get("settle"):
            async_utils.maybe_finalize_async_save(blocking=True)
        return result

    @functools.wraps(step)
    def train_step(*positional: Any, **keywords: Any) -> Any:
        result = step(*positional, **keywords)
        for marker in steps_until_release:
            steps_until_release[marker] -= 1
            if not steps_until_release[marker]:
                marker.touch()
        return result

    checkpointing.schedule_async_save, training.train_step = schedule, train_step


def prepared(request: Any, what: str, *, with_preload: bool) -> Any:
    """Arrange what happens before or while the writer writes; return the request to schedule."""
    if what == "full":
        (newest_folder() / f"__{RANK}_0.distcp").symlink_to("/dev/full")
    if what.startswith("kill"):
        kill_later(*what.split()[1:])
    if what.startswith("hold"):
        marker = Path(get_args().save).parent / f"released-{RANK}"
        steps_until_release[marker], what = int(what.split()[1]), f"wait {marker}"
    if what.startswith(_IN_WRITER):
        name = "preload_fn" if with_preload else "async_fn"
        return request._replace(**{name: functools.partial(troubled, getattr(request, name), what)})
    return request


def disturb_folder(what: str) -> None:
    """Change the files of a run once the writer has its order."""
    if what == "vanish":
        # In one step, because writers may be opening files in it.
        newest_folder().rename(Path(get_args().save).parent / "vanished")
    if what in ("bar", "clear"):
        partial = Path(get_args().save) / "latest_checkpointed_iteration.txt.partial"
        partial.mkdir() if what == "bar" else partial.rmdir()


def disturb_writer(what: str) -> None:
    """Kill the writer, now or later, or lose what it has written."""
    if what == "end":
        kill_at_the_end()
    if what in ("idle", "lose", "mute"):
        caller = async_utils._async_calls_queue.async_calls[-1].async_caller
        (caller.queue if hasattr(caller, "queue") else caller._persistent_queue).join()
    while what in ("idle", "mute") and PersistentAsyncCaller._persistent_comp_q.empty():
        time.sleep(0.01)  # it has written, but must have reported it, too
    if what == "mute":
        filesystem_async._results_queue._manager._process.kill()
    if what == "lose":
        (newest_folder() / f"__{RANK}_0.distcp").unlink()
    if what == "idle":
        PersistentAsyncCaller._persistent_process.kill()
        PersistentAsyncCaller._persistent_process.join()


def newest_folder() -> Path:
    """Return the folder of the save that is being scheduled."""
    return max(path for path in Path(get_args().save).glob("iter_*") if path.is_dir())


def kill_at_the_end() -> None:
    """Kill the writer between the last check of it and its last order."""
    close = PersistentAsyncCaller.close

    @functools.wraps(close)
    def close_with_a_kill(self: Any, abort: bool = False) -> None:
        if self.process:
            os.kill(self.process.pid, signal.SIGKILL)
        close(self, abort)

    PersistentAsyncCaller.close = close_with_a_kill


def kill_later(whom: str, seconds: str) -> None:
    """Kill this `rank`, its `writer`, or `all` processes of the job, from a thread."""
    writer = PersistentAsyncCaller._persistent_process.pid
    killings = {
        "rank": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "writer": lambda: os.kill(writer, signal.SIGKILL),
        "all": lambda: os.killpg(0, signal.SIGKILL),
    }
    threading.Timer(float(seconds), killings[whom]).start()


install()
