"""Runs tests of ColossalAI's own suite; the ranks that they spawn are forked, and every case of a test counts.

ColossalAI's tests iterate over their cases inside of the ranks (`colossalai.testing.parameterize`), and a failing case
ends the test. Here each case is recorded like a test, and the ranks continue with the next.
The command line: a file with the order of this launch (see `launches.py`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import FAILED, PASSED, Recorder

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from megatron_on_cpu.process import die_with_parent

_PACKAGES_OF_MODEL_ZOO = ("diffusers", "timm", "torchaudio", "torchvision")
_DOWNLOADED = "transformers.chatglm2"
_GRACE_SECONDS = 20.0


def main() -> int:
    """Run the tests of the order; the exit status is pytest's."""
    die_with_parent()
    order = json.loads(Path(sys.argv[1]).read_text())
    folder, checkout = Path(order["folder"]), Path(order["checkout"])
    (folder / "session").write_text(str(os.getsid(0)))
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(checkout))
    from colossalai_on_cpu import redirect

    redirect.install()
    _leave_out_models()
    if order["with_plugin"]:
        from mcore_ckpt_ext import zero_strict_state_dict

        zero_strict_state_dict.install(plugins=("gemini", "low_level_zero", "hybrid_parallel"))
    if ("mcore_ckpt_ext" in sys.modules) is not order["with_plugin"]:
        raise RuntimeError("the launch is not what it is meant to be: look at the environment")
    worlds = Worlds(folder, order["limit"])
    for module in map(importlib.import_module, ("colossalai.testing", "colossalai.testing.utils")):
        module.spawn, module.parameterize = worlds.spawn, worlds.parameterize  # type: ignore[attr-defined]
    recorder = Recorder(folder, 0, 1, done=order["done"], most=order["most"], limit=None, sample=order["sample"])
    # The environment names the running test for `Worlds`: PYTEST_CURRENT_TEST.
    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={checkout}", f"--confcutdir={checkout}"]
    return int(pytest.main([*options, *(str(checkout / test) for test in order["tests"])], plugins=[recorder]))


def _leave_out_models() -> None:
    """Leave out of the model zoo what needs a package that is not installed, or a download when it is imported."""
    absent = [name for name in _PACKAGES_OF_MODEL_ZOO if importlib.util.find_spec(name) is None]
    for name in (*absent, _DOWNLOADED):
        sys.modules[f"tests.kit.model_zoo.{name}"] = types.ModuleType(name)


class Worlds:
    """Stands in for `spawn` and `parameterize` of `colossalai.testing`.

    Args:
        folder: of this launch; each world of ranks gets one below it.
        limit: seconds for one case.
    """

    def __init__(self, folder: Path, limit: float) -> None:
        self._folder, self._limit = folder, limit
        self._recorder: Recorder | None = None
        self._test, self._done, self._worlds = "", set[str](), 0

    def parameterize(self, argument: str, values: Iterable[Any]) -> Callable[..., Any]:
        """Call the function with each value; a call that no other `parameterize` takes further is a case."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def execute(**chosen: Any) -> None:
                for value in values:
                    self._call(function, {argument: value, **chosen})

            execute.goes_through_cases = True  # type: ignore[attr-defined]
            return execute

        return decorate

    def _call(self, function: Callable[..., Any], chosen: dict[str, Any]) -> None:
        if self._recorder is None or getattr(function, "goes_through_cases", False):
            function(**chosen)
            return
        values = ",".join(f"{name}={getattr(value, '__name__', value)}" for name, value in chosen.items())
        self._record(f"{self._test} > {function.__name__}[{values}]", functools.partial(function, **chosen))

    def _record(self, case: str, call: Callable[[], Any]) -> None:
        if self._recorder is None or case in self._done:
            return
        outcome, message = PASSED, ""
        self._recorder.start(case)
        try:
            call()
        except Exception as error:
            outcome, message = FAILED, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        self._recorder.end(case, outcome, message)
        self._recorder.restart()  # for what comes between cases

    def spawn(self, function: Callable[..., Any], nprocs: int = 1, **arguments: Any) -> None:
        """Run the ranks of a test, in as many worlds as it takes until every case is done."""
        self._test, self._done = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0], set()
        whole = f"{self._test} > ranks"
        while whole not in self._done:
            world = self._folder / f"world{self._worlds}"
            world.mkdir()
            self._worlds += 1
            self._fork(world, nprocs, functools.partial(function, **arguments), whole)
            started, ended = _cases(world)
            cases = started - {whole}
            if whole in ended or not cases - self._done:
                self._done.add(whole)
            self._done |= cases

    def _fork(self, world: Path, nprocs: int, function: Callable[..., Any], whole: str) -> None:
        context = multiprocessing.get_context("fork")
        with socket.socket() as holder:  # keeps the port from others; the ranks' store may still listen there
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            port = holder.getsockname()[1]
            ranks = [
                context.Process(target=self._rank, args=(world, rank, nprocs, port, function, whole))
                for rank in range(nprocs)
            ]
            for rank in ranks:
                rank.start()
            end: float | None = None
            while running := [rank for rank in ranks if rank.is_alive()]:
                if end is None and any(rank.exitcode for rank in ranks):
                    end = time.monotonic() + _GRACE_SECONDS
                multiprocessing.connection.wait([rank.sentinel for rank in running], None if end is None else 1.0)
                if end is not None and time.monotonic() > end:
                    for rank in running:
                        rank.kill()

    def _rank(self, world: Path, rank: int, nprocs: int, port: int, function: Callable[..., Any], whole: str) -> None:
        die_with_parent()
        # torch's own threads do not survive a fork (see colossalai_on_cpu/ranks.py).
        torch.set_num_threads(1)
        self._recorder = Recorder(world, rank, nprocs, limit=self._limit)
        self._record(whole, functools.partial(function, rank, world_size=nprocs, port=port))
        # The interpreter's own teardown would wait for peers that may be gone.
        os._exit(0)


def _cases(world: Path) -> tuple[set[str], set[str]]:
    """Returns the cases that any rank has started, and those that any has ended."""
    lines = [json.loads(line) for file in world.glob("rank*") for line in file.read_text().splitlines()]
    return {line["test"] for line in lines}, {line["test"] for line in lines if "outcome" in line}


if __name__ == "__main__":
    sys.exit(main())
