"""Runs tests of Megatron-LM's own suite in one of the ranks that `megatron_on_cpu` has forked.

The command line: a file with the order of this launch (see `launches.py`).
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_on_cpu.groups import leave_groups
from packaging.version import Version
from recording import Recorder


def main() -> int:
    """Run the tests of the order; the exit status is pytest's."""
    order = json.loads(Path(sys.argv[1]).read_text())
    folder, checkout, rank = Path(order["folder"]), Path(order["checkout"]), int(os.environ["RANK"])
    if ("mcore_ckpt_ext" in sys.modules) is not order["with_plugin"]:
        raise RuntimeError("the launch is not what it is meant to be: look at the environment")
    (folder / f"session{rank}").write_text(str(os.getsid(0)))
    sys.dont_write_bytecode = True
    _use_gloo()
    _stay_offline()
    _answer_without_engine()
    recorder = Recorder(
        folder,
        rank,
        int(os.environ["WORLD_SIZE"]),
        done=order["done"],
        most=order["most"],
        limit=order["limit"],
        after_each=_leave_forgotten_groups,
        sample=order["sample"],
    )
    _make_world()
    # Absolute paths, and a temporary folder for each rank whose parent they share (tests/unit_tests/conftest.py).
    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={checkout}", f"--confcutdir={checkout}"]
    tests = [str(checkout / test) for test in order["tests"]]
    return int(pytest.main([*options, f"--basetemp={folder / f'temporary{rank}'}", *tests], plugins=[recorder]))


def _answer_without_engine() -> None:
    """Say that Transformer Engine is of no version: 0.16 compares it even where it is not installed."""
    utils: Any = importlib.import_module("megatron.core.utils")
    if utils.get_te_version() is None:
        utils._te_version = Version("0")


def _use_gloo() -> None:
    """Megatron's tests name NCCL for the world and for some groups (tests/unit_tests/test_utilities.py)."""
    distributed: Any = torch.distributed
    for name in ("init_process_group", "new_group"):
        setattr(distributed, name, _with_gloo(getattr(distributed, name)))


def _with_gloo(original: Any) -> Any:
    @functools.wraps(original)
    def make(*args: Any, **keywords: Any) -> Any:
        if "nccl" in str(keywords.get("backend")):
            keywords["backend"] = "gloo"
        return original(*args, **keywords)

    return make


def _stay_offline() -> None:
    """The suite downloads data for other tests at its start; a failure to do so does not count (conftest.py)."""
    module: Any = importlib.import_module("tests.test_utils.python_scripts.download_unit_tests_dataset")

    def refuse(**_: Any) -> None:
        raise OSError("no downloads here")

    module.download_and_extract_asset = refuse


def _make_world() -> None:
    """Some tests take the world for granted that an earlier one has made, here in an earlier launch."""
    utilities: Any = importlib.import_module("tests.unit_tests.test_utilities").Utils
    utilities.initialize_distributed()
    utilities.inited = False


def _leave_forgotten_groups() -> None:
    """Groups that the last test made and Megatron has forgotten keep threads, up to the limit of the machine."""
    parallel_state: Any = importlib.import_module("megatron.core.parallel_state")
    if torch.distributed.is_initialized() and not parallel_state.model_parallel_is_initialized():
        leave_groups()


if __name__ == "__main__":
    sys.exit(main())
