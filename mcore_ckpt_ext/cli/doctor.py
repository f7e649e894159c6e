"""`mcore-ckpt doctor`: is everything in place for a job to be served."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Literal

import torch

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.output import as_json, line, printable, table

State = Literal["ok", "note", "FAILED"]

_AUTOLOAD_SINCE = (2, 5)
_OLDEST_TORCH = (2, 4)
_ENTRY_POINTS = "torch.backends"
_ENTRY = "mcore_ckpt_ext"
# What to install for a seam's framework.
_DISTRIBUTIONS = {"megatron": "megatron-core", "nvidia_resiliency_ext": "nvidia-resiliency-ext"}
_SWITCHES = {
    "MCORE_CKPT_EXT": "0 switches the package off",
    "MCORE_CKPT_EXT_VERIFY": "full: checksums of all records before a resume",
    "MCORE_CKPT_EXT_ACCEPT_LOST": "1: resume although elements are lost",
    "MCORE_CKPT_EXT_ON_SAVE_FAILURE": "continue: training goes on when a save fails",
    "MCORE_CKPT_EXT_FALLBACK": "1: resume from the newest whole checkpoint",
    "MCORE_CKPT_EXT_WRITER_PATIENCE": "seconds after which a silent writer is given up",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0: torch loads no plugins",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was looked at."""

    what: str
    state: State
    found: str


@dataclass(frozen=True)
class Report:
    """All of it; healthy means that nothing failed."""

    healthy: bool
    lines: tuple[Line, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--save", metavar="FOLDER", type=Path, help="also look whether files can be written there")
    parser.add_argument("--json", action="store_true", help="the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Look, and say it."""
    lines = tuple(_lines(arguments.save))
    report = Report(all(item.state != "FAILED" for item in lines), lines)
    if arguments.json:
        as_json(report)
    else:
        table((item.what, item.state, item.found) for item in lines)
        line()
        line("all in place" if report.healthy else "NOT in place: see what failed")
    return 0 if report.healthy else 1


def _lines(save: Path | None) -> Iterator[Line]:
    yield Line("mcore_ckpt_ext", "ok", f"{mcore_ckpt_ext.__version__}, {Path(mcore_ckpt_ext.__file__).parent}")
    yield Line("python", "ok", f"{platform.python_version()}, {sys.executable}")
    version = _number(torch.__version__)
    yield Line("torch", "ok" if version >= _OLDEST_TORCH else "FAILED", torch.__version__)
    for name in ("megatron-core", "nvidia-resiliency-ext", "colossalai", "transformer-engine", "safetensors"):
        installed = _installed(name)
        yield Line(name, "ok" if installed else "note", installed or "not installed")
    for name, meaning in _SWITCHES.items():
        value = os.environ.get(name)
        yield Line(name, "ok" if value is None else "note", f"{printable(value)!r} ({meaning})" if value else "not set")
    yield _autoload(version)
    yield from _hooks()
    if save is not None:
        yield _writable(save)


def _autoload(version: tuple[int, ...]) -> Line:
    """Whether `import torch` puts the hooks in place."""
    what = "torch loads the hooks"
    by_hand = "call mcore_ckpt_ext.install() in the training script"
    if version < _AUTOLOAD_SINCE:
        return Line(what, "note", f"no: torch before 2.5 loads no plugins; {by_hand}")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return Line(what, "note", f"no: TORCH_DEVICE_BACKEND_AUTOLOAD=0; {by_hand}")
    if not any(entry.name == _ENTRY for entry in metadata.entry_points(group=_ENTRY_POINTS)):
        return Line(what, "FAILED", f"no: the package is on the path, but not installed (pip install); or {by_hand}")
    if os.environ.get("MCORE_CKPT_EXT") == "0":
        return Line(what, "note", "no: MCORE_CKPT_EXT=0")
    return Line(what, "ok", "yes, at the end of `import torch`")


def _hooks() -> Iterator[Line]:
    """Import what the hooks wait for, as a job would, and see how each stands."""
    if os.environ.get("MCORE_CKPT_EXT") == "0":
        yield Line("hooks", "note", "switched off: MCORE_CKPT_EXT=0")
        return
    mcore_ckpt_ext.install()
    modules = {seam.seam.rpartition(".")[0] for seam in mcore_ckpt_ext.status()}
    problems = {module: _import_problem(module) for module in modules}
    for seam in mcore_ckpt_ext.status():
        problem = problems.get(seam.seam.rpartition(".")[0])
        framework = _DISTRIBUTIONS[seam.seam.partition(".")[0]]
        # Megatron appends the commit of whatever repository its folder lies in (megatron/core/package_info.py).
        version = f" of {seam.version.partition('+')[0]}" if seam.version else ""
        if seam.state == "patched":
            yield Line(seam.seam, "ok", f"patched{version}" + (f"; {seam.reason}" if seam.reason else ""))
        elif problem is not None and _installed(framework) is None:
            yield Line(seam.seam, "note", f"not here: {problem}")
        else:
            yield Line(seam.seam, "FAILED", f"not patched{version}: {seam.reason or problem}")


def _import_problem(module: str) -> str | None:
    try:
        # Frameworks talk while they are imported.
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a framework's import dies of is what doctor tells
        return f"{type(error).__name__}: {error}"
    return None


def _writable(folder: Path) -> Line:
    """Whether the sidecar and conversions can be written where checkpoints are saved."""
    what = f"writing in {folder}"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".mcore_ckpt_ext-", suffix=".json") as file:
            file.write(b"{}")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Line(what, "FAILED", f"{error.strerror}: the sidecar would be missing, a plain resume still works")
    return Line(what, "ok", "the sidecar can be written")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
