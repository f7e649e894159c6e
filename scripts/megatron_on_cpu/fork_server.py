"""A process that has imported torch and Megatron, and forks a job for every order.

Importing takes longer than most jobs. This module itself imports neither. Jobs are not affected: a new interpreter has
imported torch, the hooks and Megatron in the environment of the job, and only forks.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

READY = b"ready"
MOST_BYTES = 1 << 17
"""Upper limit for the size of an order or an answer."""
# Variables that a job reads later; every other variable may affect the import of Megatron.
_READ_LATE = ("MEGATRON_ON_CPU_DUMP", "MEGATRON_ON_CPU_LOSSES", "MCORE_CKPT_EXT_", "TEST_", "PYTEST_CURRENT_TEST")
_MOST_SERVERS = 3
_SECONDS_TO_IMPORT = 240
_servers: OrderedDict[object, ForkServer] = OrderedDict()


class NotStartedError(RuntimeError):
    """Torch or Megatron could not be imported; the message is the process's output."""


class ForkServer:
    """The process, and the connection to it."""

    def __init__(self, megatron: Path | str | None, environment: Mapping[str, str]) -> None:
        """Start the process and wait until it has imported everything.

        Args:
            megatron: a checkout of Megatron-LM; without it, the installed megatron-core.
            environment: the complete environment of the process.

        Raises:
            NotStartedError: torch or Megatron could not be imported.
        """
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # -P: modules of the working folder do not replace Python's.
        command = [sys.executable, "-P", "-m", "megatron_on_cpu.forked_ranks", "--socket", str(other.fileno())]
        if megatron is not None:
            command += ["--megatron", str(megatron)]
        with tempfile.TemporaryFile("w+") as output, other:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
            other.close()
            if not self._is_ready():
                self.close()
                output.seek(0)
                raise NotStartedError(output.read())

    def _is_ready(self) -> bool:
        self._socket.settimeout(_SECONDS_TO_IMPORT)
        try:
            return self._socket.recv(MOST_BYTES) == READY
        except TimeoutError:
            return False
        finally:
            self._socket.settimeout(None)

    @property
    def is_alive(self) -> bool:
        """Return whether the process accepts orders."""
        return self._process.poll() is None

    def fork(self, order: Mapping[str, Any]) -> tuple[int, TextIO]:
        """Start a job, one at a time, and return its process, which leads its own session, and its output.

        Args:
            order: see `forked_ranks`.
        """
        read_end, write_end = os.pipe()
        try:
            socket.send_fds(self._socket, [json.dumps(order).encode()], [write_end])
        finally:
            os.close(write_end)
        return int(self._socket.recv(MOST_BYTES)), os.fdopen(read_end, errors="replace")

    def wait(self) -> int:
        """Wait for the end of the job, and return its exit code."""
        code = int(self._socket.recv(MOST_BYTES))
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        """End the process, and a job that may still run."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def fork_server(megatron: Path | str | None, environment: Mapping[str, str]) -> ForkServer:
    """Return the process for a Megatron and an environment; the last few are kept for further jobs."""
    counted = frozenset(item for item in environment.items() if not item[0].startswith(_READ_LATE))
    key = (os.getpid(), str(megatron), counted)
    server = _servers.pop(key, None)
    if server is None or not server.is_alive:
        while len(_servers) >= _MOST_SERVERS:
            _servers.popitem(last=False)[1].close()
        server = ForkServer(megatron, environment)
    _servers[key] = server
    return server


@atexit.register
def _close_all() -> None:
    for (owner, *_), server in _servers.items():  # type: ignore[misc]
        if owner == os.getpid():
            server.close()
