"""Ends the processes that Megatron starts for background saves when the rank that started them ends.

Sources in megatron/core/dist_checkpointing/strategies, core_v0.12.3 to 0.19.2 and the development head of August 2026:
a persistent writer, forked, spawned or started by a fork server, runs `PersistentAsyncCaller.async_loop`
(async_utils.py); a fork server ends with the last process that it started. `get_write_results_queue`
(filesystem_async.py; `_get_write_results_queue` up to 0.16) starts the process of a `Manager`.
"""

from __future__ import annotations

import functools
from typing import Any

from mcore_ckpt_ext.megatron.saving.parent_watch import children_end_with_this_process, end_with_parent
from mcore_ckpt_ext.patching.patch_point import Function


def wrap_async_loop(original: Function) -> Function:
    """Wrap the loop of a persistent writer: the writer ends with its rank, even before its first request."""

    @functools.wraps(original)
    def async_loop(*positional: Any, **keywords: Any) -> Any:
        end_with_parent()
        return original(*positional, **keywords)

    return async_loop


def wrap_results_queue(original: Function) -> Function:
    """Wrap the start of the process that holds the writers' results: that process ends with its rank."""
    return children_end_with_this_process()(original)  # the context, as a decorator: each call enters it
