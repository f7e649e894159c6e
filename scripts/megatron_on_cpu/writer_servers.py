"""Fork servers of multiprocessing that need not import torch and Megatron again.

Megatron 0.19 starts the writer of asynchronous saves by the method "forkserver": a new interpreter, whose child imports
both for seconds, on every rank. Here the new interpreter is a copy of the rank from before its script ran, which has
imported them.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Sequence
from multiprocessing import forkserver, util

from megatron_on_cpu.fork_server import MOST_BYTES


def keep_copy(arguments: Sequence[str]) -> None:
    """Fork a copy of this process that becomes its fork server once one is started.

    Args:
        arguments: those of the job; without asynchronous saves nothing happens.
    """
    if "--async-save" not in arguments:
        return
    owner = os.getpid()
    orders, copy_orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    copy = os.fork()
    if copy == 0:
        orders.close()
        _serve(copy_orders)
        os._exit(0)
    copy_orders.close()
    start_interpreter = util.spawnv_passfds  # type: ignore[attr-defined]

    def start(path: bytes, command: Sequence[str], descriptors: Sequence[int]) -> int:
        is_unused = orders.fileno() >= 0 and os.getpid() == owner
        if not is_unused or not command[-1].startswith(f"from {forkserver.__name__} import main"):
            return int(start_interpreter(path, command, descriptors))
        order = json.dumps({"command": command[-1], "environment": dict(os.environ)}).encode()
        with orders:
            socket.send_fds(orders, [order], descriptors)
        return copy

    util.spawnv_passfds = start  # type: ignore[attr-defined]


def _serve(orders: socket.socket) -> None:
    """Wait for the order, and run the fork server; return where the rank has ended without one."""
    with orders:
        message, descriptors, *_ = socket.recv_fds(orders, MOST_BYTES, 2)
    if not message:
        return
    order = json.loads(message)
    os.environ.clear()
    os.environ.update(order["environment"])
    # `main(listener, pipe, ...)`: a descriptor has another number in this process.
    numbers = ", ".join(map(str, descriptors))
    try:
        exec(re.sub(r"main\(\d+, \d+", f"main({numbers}", order["command"], count=1), {})
    except SystemExit:
        sys.stdout.flush()
