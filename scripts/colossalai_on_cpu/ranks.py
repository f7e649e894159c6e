"""Runs a function on forked CPU ranks that communicate over gloo, and returns the results.

The parent has imported all slow modules, so four ranks start in a fraction of a second. The parent must have no process
group and no running threads.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_GRACE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


class RankError(RuntimeError):
    """A rank failed, or the ranks did not finish in time; the message has their tracebacks."""


def run(world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
    """Call ``function(*arguments)`` on every rank of a new world, and return the results in rank order.

    Args:
        world_size: number of ranks.
        function: function that each rank calls; it may be a closure, only its result is pickled.
        arguments: arguments of the function.
        timeout: seconds after which all ranks are ended.

    Raises:
        RankError: a rank raised an error or died, or the time limit was reached.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ends = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(target=_rank, args=(rank, world_size, Path(folder) / "store", end, function, arguments))
            for rank, (_, end) in enumerate(ends)
        ]
        for process, (_, end) in zip(processes, ends, strict=True):
            with warnings.catch_warnings():
                # numpy's BLAS has a thread that waits for work; it supports forking.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            end.close()
        try:
            return _collected([receiver for receiver, _ in ends], timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collected(receivers: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    end = time.monotonic() + timeout
    while len(results) + len(failures) < len(receivers):
        waiting = [r for rank, r in enumerate(receivers) if rank not in results and rank not in failures]
        ready = multiprocessing.connection.wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            rank = receivers.index(receiver)
            try:
                succeeded, answer = pickle.loads(receiver.recv_bytes())
            except EOFError:
                succeeded, answer = False, "the process died without a word"
            (results if succeeded else failures)[rank] = answer
            if not succeeded:
                # The other ranks may hang in a collective; ranks that also fail have this long to report why.
                end = min(end, time.monotonic() + _GRACE_SECONDS)
    if len(results) < len(receivers):
        silent = sorted(set(range(len(receivers))) - set(results) - set(failures))
        told = [f"rank {rank}:\n{text}" for rank, text in sorted(failures.items())]
        raise RankError("\n".join([*told, f"no answer from ranks {silent}" if silent else ""]))
    return [results[rank] for rank in range(len(receivers))]


def _rank(
    rank: int, world_size: int, store: Path, end: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # torch's own threads do not survive a fork. The first thread that needs them creates them again, and if two threads
    # do so at once, as with gloo's, one of them fails ("Invalid thread pool!").
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo")
    try:
        # A file instead of a port: worlds of several test runs cannot meet.
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        torch.manual_seed(0)
        random.seed(0)
        answer = (True, function(*arguments))
    except BaseException:  # noqa: BLE001 - whatever it was, the rank has failed and says so
        answer = (False, traceback.format_exc())
    # Not with `send`: torch would share the memory of tensors with a process that is about to end.
    end.send_bytes(pickle.dumps(answer))
    end.close()
    # Python's own shutdown would wait for peers that may have ended.
    os._exit(0)
