"""Imports torch and Megatron once, then forks a job for every order, which forks its ranks.

``fork_server`` starts it in a separate session, and every job has its own: ``launch.run`` ends a job at its time limit
and cleans up after it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import multiprocessing
import multiprocessing.spawn
import os
import runpy
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_on_cpu import compat, dump_optimizer, engine_kernels, record_losses, redirect
from megatron_on_cpu.fork_server import MOST_BYTES, READY
from megatron_on_cpu.groups import share_device
from megatron_on_cpu.process import die_with_parent
from megatron_on_cpu.writer_servers import keep_copy

# When a rank fails, the others usually hang in a collective; ranks that also fail have this long to report why.
_GRACE_SECONDS = 5.0
# Most objects of an import and of a short job live to its end. With Python's thresholds, the garbage collector takes a
# seventh of the time to import Megatron, and a sixteenth of a job's.
_CREATED_BEFORE_COLLECTION = 50_000
# Modules that all ranks would import at the same time.
_MEGATRON_MODULES = ("megatron.training", "megatron.training.checkpointing", "megatron.core.models.gpt")
_TOKENIZER_MODULES = ("transformers", "transformers.models.auto.tokenization_auto", "sentencepiece", "tiktoken")
# What a job of 0.19 imports when it first uses it; earlier releases lack some.
_LATER_MODULES = (
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.dist_checkpointing.gpt_checkpoint_interop",
    "megatron.core.models.mimo.optimizer",
    "megatron.core.tokenizers.text.models",
    "torch.utils.serialization.config",
)


def main() -> None:
    """Import everything, then execute orders from the socket until the other side closes it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--megatron", type=Path)
    options = parser.parse_args()
    die_with_parent()
    gc.set_threshold(_CREATED_BEFORE_COLLECTION)
    import_megatron(options.megatron)
    prepare_to_fork()
    with socket.socket(fileno=options.socket) as orders:
        orders.sendall(READY)
        while _serve(orders):
            pass


def _serve(orders: socket.socket) -> bool:
    """Fork one job; send its process ID at once, and its exit code when it has ended."""
    message, streams, *_ = socket.recv_fds(orders, MOST_BYTES, 1)
    if not message:
        return False
    job = os.fork()
    if job == 0:
        orders.close()
        os._exit(_exit_code_of(lambda: sys.exit(_run_job(json.loads(message), streams[0]))))
    os.close(streams[0])
    orders.sendall(str(job).encode())
    _, status = os.waitpid(job, 0)
    orders.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    return True


def _run_job(order: dict[str, Any], output: int) -> int:
    """Fork the ranks of a job and wait for them.

    Args:
        order: `ranks` (their number), `script`, `arguments`, `plugins` (files), `environment` (complete), `folder`.
        output: the file descriptor for everything that is printed.
    """
    os.setsid()
    die_with_parent()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    record_losses.install()
    dump_optimizer.install()
    ranks = Ranks()
    with reserved_port() as port:
        for rank in range(order["ranks"]):
            ranks.fork(rank, partial(_run_rank, rank, order, port))
        code = ranks.wait()
    sys.stdout.flush()
    return code


def import_megatron(checkout: Path | None) -> None:
    """Import all slow modules, redirected to the CPU, before forking."""
    torch.set_num_threads(1)
    redirect.install()
    if checkout is not None:
        sys.path.insert(0, str(checkout))
        import megatron

        # A namespace package: without this, modules that the checkout lacks would come from the installed version.
        megatron.__path__ = [str(checkout / "megatron")]
    engine_kernels.install()
    compat.apply()
    for name in _MEGATRON_MODULES:
        importlib.import_module(name)
    for name in (*_TOKENIZER_MODULES, *_LATER_MODULES):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def prepare_to_fork() -> None:
    """Prepare for forking after all imports, and for processes that Megatron spawns.

    Garbage collection in a rank must not scan imported objects, because this writes to their pages. Checkpoint writers
    must start with the redirection, and queues must start fast.
    A spawned Python runs the parent's main module again before anything else.  This would be the training script, which
    a writer does not need, so it gets the module that installs the redirection instead. Managers only forward results;
    they are forked and need not import torch again.
    """
    gc.collect()
    gc.freeze()
    original = multiprocessing.spawn.get_preparation_data

    def prepare(name: str) -> dict[str, Any]:
        data = original(name)
        data.pop("init_main_from_path", None)
        data["init_main_from_name"] = "megatron_on_cpu.spawned"
        return data

    multiprocessing.spawn.get_preparation_data = prepare
    multiprocessing.get_context("spawn").Manager = multiprocessing.get_context("fork").Manager  # type: ignore[method-assign]


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port for the ranks' store until the ranks have finished.

    A socket that is bound but does not listen prevents Linux from assigning the port to a connection. The store can
    still listen on it, because both sockets have SO_REUSEADDR.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def _run_rank(rank: int, order: dict[str, Any], port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(order["ranks"]),
        LOCAL_WORLD_SIZE=str(order["ranks"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    keep_copy(order["arguments"])
    share_device()
    for plugin in order["plugins"]:
        runpy.run_path(plugin)
    sys.path.insert(0, str(Path(order["script"]).parent))
    sys.argv = [order["script"], *order["arguments"]]
    runpy.run_path(order["script"], run_name="__main__")


class Ranks:
    """The forked processes, with their exit codes and output."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._unfinished_lines: dict[int, bytes] = {}
        self._returncode = 0
        self._kill_at: float | None = None

    def fork(self, rank: int, body: Callable[[], None]) -> None:
        """Start a rank that runs ``body``."""
        read_end, write_end = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            for stream in (1, 2):
                os.dup2(write_end, stream)
            # torch's own threads do not survive a fork. The first thread that needs them creates them again, and if two
            # threads do so at once, as with gloo's, one of them fails ("Invalid thread pool!").
            torch.set_num_threads(1)
            os._exit(_exit_code_of(body))
        os.close(write_end)
        os.set_blocking(read_end, False)
        self._pids[pid] = rank
        self._unfinished_lines[rank] = b""
        self._selector.register(read_end, selectors.EVENT_READ, rank)

    def wait(self) -> int:
        """Wait for all ranks, and return the exit code; the first failure ends the others."""
        while self._pids:
            self._pass_on_output(timeout=0.05)
            self._reap()
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                for pid in self._pids:
                    os.kill(pid, signal.SIGKILL)
                self._kill_at = None
        self._pass_on_output(timeout=0)
        return self._returncode

    def _reap(self) -> None:
        for pid in list(self._pids):
            finished, status = os.waitpid(pid, os.WNOHANG)
            if not finished:
                continue
            rank = self._pids.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if code and not self._returncode:
                print(f"[launch] rank {rank} failed with {code}", flush=True)
                self._returncode = code if code > 0 else 128 - code
                self._kill_at = time.monotonic() + _GRACE_SECONDS

    def _pass_on_output(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            try:
                text = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if not text:
                self._selector.unregister(key.fd)
            *lines, self._unfinished_lines[key.data] = (self._unfinished_lines[key.data] + text).split(b"\n")
            for line in lines:
                sys.stdout.write(f"[rank {key.data}] {line.decode(errors='replace')}\n")
        sys.stdout.flush()


def _exit_code_of(body: Callable[[], None]) -> int:
    """Run a rank to its end, without Python's own shutdown, which would wait for finished processes."""
    code = 1
    try:
        body()
        code = 0
    except SystemExit as exit_request:
        code = exit_request.code if isinstance(exit_request.code, int) else int(exit_request.code is not None)
    except BaseException:  # noqa: BLE001 - whatever it was, the rank has failed and says so
        traceback.print_exc()
    for process in multiprocessing.active_children():
        process.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
