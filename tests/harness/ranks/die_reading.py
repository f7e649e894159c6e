"""Plugin: rank 0 is killed while this package reads the tensors that Megatron requests, after half of them."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

from mcore_ckpt_ext.planning.plan import Plan
from mcore_ckpt_ext.transfer import Transfer


def install() -> None:
    """Wrap the execution of plans."""
    original = Transfer.execute

    @functools.wraps(original)
    def execute(self: Transfer, plan: Plan, destinations: Any, *more: Any) -> None:
        if os.environ["RANK"] == "0" and len(plan.reads) > 1:
            original(self, Plan(plan.wanted, plan.reads[::2]), destinations, *more)
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, plan, destinations, *more)

    Transfer.execute = execute  # type: ignore[method-assign]


install()
