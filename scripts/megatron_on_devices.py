"""Runs a training script of the installed Megatron-LM on the GPUs of this machine, one rank on each.

Only the helper for datasets is provided (`compat.use_compiled_dataset_helper`): it uses the installed devices, NCCL,
Transformer Engine and torch. `megatron_on_cpu.launch` runs the same scripts on CPU ranks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_on_cpu.launch import RunResult

from mcore_ckpt_ext.selftest.launcher import all_on_this_node, log_of, start

_SCRIPTS = Path(__file__).parent
# Variables are set first: on import, torch loads this package, and Megatron reads some variables.
_RANK = """
import json, os, sys
from pathlib import Path
order = json.loads(Path(sys.argv[1]).read_text())
os.environ.update(order["environment"])
sys.path[:0] = [*order["environment"]["PYTHONPATH"].split(os.pathsep), str(Path(order["script"]).parent)]
sys.argv = [order["script"], *order["arguments"]]
import runpy, torch
if torch.accelerator.is_available():
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
from megatron_on_cpu import compat
compat.use_compiled_dataset_helper()
for plugin in order["plugins"]:
    runpy.run_path(plugin)
runpy.run_path(order["script"], run_name="__main__")
"""


def run(
    world_size: int,
    script: Path | str,
    arguments: Sequence[str],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    plugin_files: Sequence[Path | str] = (),
    log_file: Path | str | None = None,
) -> RunResult:
    """Run a script on several ranks, and wait for them; afterwards none of their processes remains.

    Args:
        world_size: number of ranks, each with its own GPU.
        script: the training script, run as `__main__` in every rank.
        arguments: command line of the script.
        timeout: seconds after which everything is killed.
        environment: additional environment variables.
        plugin_files: Python files that every rank executes before the script.
        log_file: receives all output.
    """
    own = dict(environment or {})
    paths = (own.get("PYTHONPATH"), str(_SCRIPTS), str(_SCRIPTS.parent), os.environ.get("PYTHONPATH"))
    order = {
        "script": str(Path(script).resolve()),
        "arguments": [*map(str, arguments)],
        "plugins": [str(Path(plugin).resolve()) for plugin in plugin_files],
        "environment": {**own, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    }
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "order.json"
        path.write_text(json.dumps(order))
        ended = start(
            all_on_this_node(world_size), path, progress=lambda: 0, patience=timeout,
            program=(sys.executable, "-c", _RANK),
        )  # fmt: skip
        logs = [log_of(folder, rank).read_text(errors="replace") for rank in range(world_size)]
    lines = [f"[rank {rank}] {line}" for rank, text in enumerate(logs) for line in text.splitlines()]
    output = "\n".join([*lines, *([] if ended.succeeded else [str(ended)])])
    if log_file is not None:
        Path(log_file).write_text(output)
    return RunResult(0 if ended.succeeded else 1, output, time.monotonic() - started)
