"""Program: torchrun's agents on one machine; they fork their workers, since imports take longer than a job.

The argument is a file with JSON: see `tests.harness.elastic.Scenario`. The rendezvous' store is in this process, as on
the node of a launcher. Each agent is what `torchrun` runs (`elastic_launch`); its workers run the script as `__main__`.
"""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import selectors
import signal
import socket
import sys
import time
from multiprocessing.util import _run_finalizers  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

import torch
from megatron_on_cpu import dump_optimizer, record_losses
from megatron_on_cpu.process import die_with_parent
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

# An agent counts as dead after this many seconds without a sign of life: more on a machine whose processes wait.
_SECONDS_TO_DEATH = 3 + round(os.getloadavg()[0])
RENDEZVOUS = {
    "is_host": "0", "keep_alive_interval": 1, "keep_alive_max_attempt": _SECONDS_TO_DEATH,
    "last_call_timeout": _SECONDS_TO_DEATH // 2,
    "join_timeout": 300,
}  # fmt: skip


def work(order: dict[str, Any]) -> None:
    """Be one worker: train."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)
    folder = Path(order["folder"])
    start = os.environ["MASTER_PORT"]
    if os.environ["RANK"] == "0":
        with (folder / "starts").open("a") as starts:
            starts.write(f"{start}\n")
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo",
        MEGATRON_ON_CPU_LOSSES=str(folder / f"losses-{start}.json"),
        MEGATRON_ON_CPU_DUMP=str(folder / f"dump-{start}"),
    )
    record_losses.install()
    dump_optimizer.install()
    stop_at_gates(order["gates"], folder)
    for plugin in order["plugins"]:
        runpy.run_path(plugin)
    sys.path.insert(0, str(Path(order["script"]).parent))
    sys.argv = [order["script"], *order["arguments"]]
    try:
        runpy.run_path(order["script"], run_name="__main__")
    finally:
        # torch keeps a worker that has returned until all of its agent have, which a process of its own does not.
        _run_finalizers()


def stop_at_gates(gates: list[int], folder: Path) -> None:
    """Let training stop after some iterations until their gates are open, or a signal has arrived."""
    training: Any = sys.modules["megatron.training.training"]
    original = training.training_log

    @functools.wraps(original)
    def log_and_stop(*positional: Any, **keywords: Any) -> Any:
        iteration = training.get_args().curr_iteration + 1
        result = original(*positional, **keywords)
        gate = folder / f"gate-{iteration}"
        if iteration in gates and not gate.exists():
            if os.environ["RANK"] == "0":
                print(f"at gate {iteration}", flush=True)
            while not gate.exists() and not has_signal():
                time.sleep(0.02)
        return result

    def has_signal() -> bool:
        if not training.get_args().exit_signal_handler:
            return False
        return bool(training.get_signal_handler()._signal_received)

    training.training_log = log_and_stop


class Agents:
    """The agents of a scenario."""

    def __init__(self, order: dict[str, Any], endpoint: str) -> None:
        self._order, self._endpoint = order, endpoint
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, bytes] = {}
        self._seen: list[str] = []
        self._next = 0
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}

    def start(self, number: int) -> None:
        """Start an agent."""
        read_end, write_end = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            for stream in (1, 2):
                os.dup2(write_end, stream)
            os._exit(self._be_agent())
        os.close(write_end)
        os.set_blocking(read_end, False)
        self.pids[number] = pid
        self._lines[number] = b""
        self._selector.register(read_end, selectors.EVENT_READ, number)

    def _be_agent(self) -> int:
        order = self._order
        least, _, most = order["nodes"].partition(":")
        config = LaunchConfig(
            min_nodes=int(least), max_nodes=int(most or least), nproc_per_node=order["ranks"], run_id=order["name"],
            rdzv_backend="c10d", rdzv_endpoint=self._endpoint, rdzv_configs=dict(RENDEZVOUS), monitor_interval=0.05,
            max_restarts=order["max_restarts"], start_method="fork", local_addr="127.0.0.1",
        )  # fmt: skip
        # The name of the caller, for events, takes seconds where as many modules are imported as here.
        dynamic_rendezvous.get_method_name = lambda *_: "method"
        try:
            elastic_launch(config, work)(order)
        except BaseException as error:
            print(f"agent ends: {type(error).__name__}: {error}", flush=True)
            return 1
        return 0

    def wait_for(self, pattern: str) -> None:
        """Wait for a line that no earlier step has waited for.

        Raises:
            RuntimeError: all agents have ended without one.
        """
        while True:
            while self._next < len(self._seen):
                self._next += 1
                if re.search(pattern, self._seen[self._next - 1]):
                    return
            if not self.pids:
                raise RuntimeError(f"no line matches {pattern}")
            self._pass_on()

    def wait(self) -> None:
        """Wait until all agents have ended."""
        while self.pids:
            self._pass_on()
        self._pass_on()

    def kill(self, number: int, signal_name: str) -> None:
        """Send a signal to an agent, and not to its workers."""
        os.kill(self.pids[number], signal.Signals[signal_name])

    def _pass_on(self) -> None:
        for key, _ in self._selector.select(0.05):
            text = os.read(key.fd, 1 << 16)
            if not text:
                self._selector.unregister(key.fd)
            *lines, self._lines[key.data] = (self._lines[key.data] + text).split(b"\n")
            for line in lines:
                self._print(f"[agent {key.data}] {line.decode(errors='replace')}")
        for number, pid in list(self.pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.pids[number]
                self.codes[number] = os.waitstatus_to_exitcode(status)
                self._print(f"[agents] agent {number} ended with {self.codes[number]}")

    def _print(self, line: str) -> None:
        self._seen.append(line)
        print(line, flush=True)


def others_in_session() -> list[str]:
    """Return the command lines of other processes in this session, once zombies are gone."""
    own, found = os.getsid(0), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) not in (os.getpid(), os.getppid()):
            try:
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == own and state != "Z":
                    found.append(f"{folder.name} {(folder / 'cmdline').read_text()[:80]}")
            except (OSError, ValueError):
                continue
    return found


def main() -> None:
    """Run the scenario."""
    order = json.loads(Path(sys.argv[1]).read_text())
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.update(order["environment"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    agents = Agents(order, f"127.0.0.1:{port}")
    for number in range(order["agents"]):
        agents.start(number)
    for pattern, action, *details in order["steps"]:
        agents.wait_for(pattern)
        print(f"[agents] {action} {' '.join(map(str, details))}", flush=True)
        if action == "open":
            (Path(order["folder"]) / f"gate-{details[0]}").touch()
        elif action == "start":
            agents.start(details[0])
        else:
            agents.kill(details[0], action)
    agents.wait()
    del store
    until = time.monotonic() + 10
    while (left := others_in_session()) and time.monotonic() < until:
        time.sleep(0.05)
    print(f"[agents] result {json.dumps({'codes': agents.codes, 'left': left})}", flush=True)


main()
