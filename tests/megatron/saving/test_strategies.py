"""Test the reports of the writers behind Megatron's asynchronous saves."""

from __future__ import annotations

import multiprocessing
import pickle
from types import SimpleNamespace

import pytest

from mcore_ckpt_ext.megatron.saving.strategies import MegatronWriters, _ImpatientQueue


@pytest.mark.parametrize("is_empty", [True, False])
def test_are_done(is_empty: bool) -> None:
    queue = SimpleNamespace(get_num_unfinalized_calls=lambda: int(not is_empty))
    writers = MegatronWriters({"_async_calls_queue": queue}, pytest.fail)
    assert writers.are_done() is is_empty


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_queue_is_not_waited_for_after_its_writer_is_lost(is_lost: bool) -> None:
    """An item that nobody has done would block `JoinableQueue.join` forever."""
    original, given_up = multiprocessing.get_context("fork").JoinableQueue(), []
    watch = SimpleNamespace(problem=lambda owes: "killed" if owes and is_lost else None)
    queue = _ImpatientQueue(original, lambda: watch, lambda: given_up.append("writer"))
    queue.put("item")
    assert queue.get(timeout=60) == "item"
    if not is_lost:
        queue.task_done()
    queue.join()
    assert given_up == ["writer"] * is_lost


def test_a_process_receives_the_original_queue() -> None:
    queue = _ImpatientQueue("any object", lambda: None, lambda: None)
    assert pickle.loads(pickle.dumps(queue)) == "any object"
