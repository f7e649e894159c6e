"""Program: torchrun's agents on one machine.

The argument is a file with JSON: see `elastic_jobs.Scenario`. The rendezvous' store is in this process, as on the node
of a launcher. Each agent is what `torchrun` runs (`elastic_launch`); its workers run the script as `__main__`. They are
forked, since imports take longer than a toy job, or new processes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_on_cpu.elastic_worker import work
from megatron_on_cpu.process import die_with_parent

# An agent counts as dead after this many seconds without a sign of life: more on a machine whose processes wait.
_SECONDS_TO_DEATH = 3 + round(os.getloadavg()[0])
RENDEZVOUS = {
    "is_host": "0", "keep_alive_interval": 1, "keep_alive_max_attempt": _SECONDS_TO_DEATH,
    "last_call_timeout": _SECONDS_TO_DEATH // 2,
    "join_timeout": 300,
}  # fmt: skip


class Agents:
    """The agents of a scenario."""

    def __init__(self, order: dict[str, Any], endpoint: str) -> None:
        self._order, self._endpoint = order, endpoint
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, bytes] = {}
        self._seen: list[str] = []
        self._next = 0
        self._timeline = (Path(order["folder"]) / "timeline").open("w")
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
            rdzv_backend="c10d", rdzv_endpoint=self._endpoint, rdzv_configs={**RENDEZVOUS, **order["rendezvous"]},
            monitor_interval=0.05,
            max_restarts=order["max_restarts"], start_method="fork", local_addr="127.0.0.1",
        )  # fmt: skip
        # The name of the caller, for events, takes seconds where as many modules are imported as here.
        dynamic_rendezvous.get_method_name = lambda *_: "method"
        api = logging.getLogger("torch.distributed.elastic.agent.server.api")
        api.addHandler(logging.StreamHandler())
        api.setLevel(logging.INFO)
        try:
            if order["forks"]:
                elastic_launch(config, work)(order)
            else:
                elastic_launch(config, sys.executable)("-P", "-m", "megatron_on_cpu.elastic_worker", sys.argv[1])
        except BaseException as error:  # noqa: BLE001 - whatever it was, the agent has ended and says so
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
                self.print(f"[agent {key.data}] {line.decode(errors='replace')}")
        for number, pid in list(self.pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.pids[number]
                self.codes[number] = os.waitstatus_to_exitcode(status)
                self.print(f"[agents] agent {number} ended with {self.codes[number]}")

    def print(self, line: str) -> None:
        """Print a line, and write it down with the time."""
        self._seen.append(line)
        self._timeline.write(f"{time.time():.4f} {line}\n")
        self._timeline.flush()
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
        agents.print(f"[agents] {action} {' '.join(map(str, details))}")
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
