"""The processes that Megatron starts for saves in the background end when the rank that started them does.

Sources in megatron/core/dist_checkpointing/strategies, core_v0.12.3 to 0.19.2 and the development head of August 2026:
`PersistentAsyncCaller.async_loop` (async_utils.py) is what a persistent writer runs, forked, spawned or from a fork
server, which itself ends with the last of them; `get_write_results_queue` (filesystem_async.py, since 0.17) starts the
process of a `Manager`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mcore_ckpt_ext.megatron.saving.parent_watch import children_end_with_this_process, end_with_parent

Function = Callable[..., Any]


def wrap_async_loop(original: Function) -> Function:
    """Around what a persistent writer runs: it ends with its rank, also before its first order."""

    @functools.wraps(original)
    def async_loop(*positional: Any, **keywords: Any) -> Any:
        end_with_parent()
        return original(*positional, **keywords)

    return async_loop


def wrap_results_queue(original: Function) -> Function:
    """Around the start of the process that holds the writers' results: it ends with its rank."""

    @functools.wraps(original)
    def get_write_results_queue(*positional: Any, **keywords: Any) -> Any:
        with children_end_with_this_process():
            return original(*positional, **keywords)

    return get_write_results_queue
