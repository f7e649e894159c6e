"""Plugin: while the second start of a job loads, it stops until the gate `gate-load` is open."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.planning.plan import Plan
from mcore_ckpt_ext.transfer import Transfer


def install(folder: Path) -> None:
    """Wrap the execution of plans."""
    original = Transfer.execute

    @functools.wraps(original)
    def execute(self: Transfer, plan: Plan, *positional: Any, **keywords: Any) -> None:
        starts = (folder / "starts").read_text().split()
        if len(starts) == 2 and len(plan.reads) > 1 and not (folder / "gate-load").exists():
            if os.environ["RANK"] == "0":
                print("while loading", flush=True)
            while not (folder / "gate-load").exists():
                time.sleep(0.02)
        original(self, plan, *positional, **keywords)

    Transfer.execute = execute  # type: ignore[method-assign]


install(Path(os.environ["TEST_FOLDER"]))
