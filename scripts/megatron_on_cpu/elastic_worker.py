"""A worker of torchrun's agents, which trains: forked by `elastic_agents`, or a process of its own as torchrun's are.

    python -m megatron_on_cpu.elastic_worker ORDER

The argument is a file with JSON: see `elastic_jobs.Scenario`.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import sys
import time
from multiprocessing.util import _run_finalizers  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

import torch

from megatron_on_cpu import dump_optimizer, record_losses
from megatron_on_cpu.forked_ranks import import_megatron, prepare_to_fork
from megatron_on_cpu.writer_servers import keep_copy


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
    keep_copy(order["arguments"])
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


def main() -> None:
    """Import everything, and train."""
    order = json.loads(Path(sys.argv[1]).read_text())
    import_megatron(Path(order["megatron"]) if order["megatron"] else None)
    prepare_to_fork()
    work(order)


if __name__ == "__main__":
    main()
