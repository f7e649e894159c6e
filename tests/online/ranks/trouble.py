"""Plugin: something happens at a save. `TEST_TROUBLE` is JSON: `save` (counted from 1), `ranks`, `what`.

In the writer process, before it writes: `sleep SECONDS`, `raise`, `SIGKILL`, `SIGSTOP`; with `preload`, before it
has copied a tensor. In the training process, right after the writer got its order: `vanish` removes the folder,
`idle` kills the writer once it is done.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(os.environ["TEST_RANK_SCRIPTS"])))

from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
from megatron.training import async_utils, checkpointing, get_args
from troubled_writing import troubled

TROUBLE = json.loads(os.environ["TEST_TROUBLE"])


def install() -> None:
    """Wrap the scheduling that `save_checkpoint` calls."""
    original, saves = checkpointing.schedule_async_save, []

    @functools.wraps(original)
    def schedule(request: Any) -> Any:
        saves.append(request)
        is_meant = len(saves) == TROUBLE["save"] and int(os.environ["RANK"]) in TROUBLE["ranks"]
        what = TROUBLE["what"] if is_meant else ""
        if what and what not in ("vanish", "idle"):
            name = "preload_fn" if TROUBLE.get("preload") else "async_fn"
            request = request._replace(**{name: functools.partial(troubled, getattr(request, name), what)})
        result = original(request)
        if what == "vanish":
            newest = max(Path(get_args().save).glob("iter_*"))
            shutil.rmtree(newest)
        if what == "idle":
            async_utils._async_calls_queue.async_calls[-1].async_caller._persistent_queue.join()
            PersistentAsyncCaller._persistent_process.kill()
            time.sleep(0.5)
        return result

    checkpointing.schedule_async_save = schedule


install()
