"""`mcore-ckpt doctor`: checks the installation in the environment of a job."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.copies import installed_copies
from mcore_ckpt_ext.cli.folding import group_by
from mcore_ckpt_ext.cli.json_output import print_result
from mcore_ckpt_ext.cli.output import BAD, GOOD, REMARKABLE, Painted, line, table
from mcore_ckpt_ext.cli.torch_plugins import explain_import_failures, is_registered
from mcore_ckpt_ext.errors import UsageError, escape, quantity
from mcore_ckpt_ext.job.releases import TORCH_IS_SUPPORTED, TORCH_LOADS_PLUGINS
from mcore_ckpt_ext.megatron.patch_points import PATCH_POINTS
from mcore_ckpt_ext.settings import SETTINGS, SWITCH, Setting
from mcore_ckpt_ext.storage.paths import local_path
from mcore_ckpt_ext.versions import Version, installed_version, parse_version

State = Literal["ok", "note", "FAILED"]

_STYLES: dict[State, str] = {"ok": GOOD, "note": REMARKABLE, "FAILED": BAD}
_NO_MEGATRON = "Megatron is not installed here"
# The distribution to install for a patch point's module.
_DISTRIBUTIONS = {
    "megatron.bridge": "megatron-bridge",
    "megatron": "megatron-core",
    "nvidia_resiliency_ext": "nvidia-resiliency-ext",
    "swift": "ms-swift",
}
# For each distribution: the training loop, and prefixes of modules, each with at least one patch point.
_LOOPS = {
    "megatron-core": ("loop: Megatron's own", ("megatron.training.checkpointing", "megatron.core.optimizer")),
    "megatron-bridge": ("loop: Megatron-Bridge", ("megatron.bridge", "megatron.core.optimizer")),
    "nemo-rl": ("loop: NeMo-RL, on Megatron-Bridge", ("megatron.bridge", "megatron.core.optimizer")),
    "ms-swift": ("loop: ms-swift", ("swift.", "megatron.core.optimizer")),
    "verl": ("loop: verl", ("megatron.core.optimizer",)),
}
# torch/__init__.py:_is_device_backend_autoload_enabled, 2.5 to 2.15.
_AUTOLOAD = Setting("TORCH_DEVICE_BACKEND_AUTOLOAD", "0: torch loads no plugins", True, lambda text: text == "1")
# What lines of these names are called where they are joined with a count.
_GROUPS = {
    **dict.fromkeys((setting.name for setting in (*SETTINGS, _AUTOLOAD)), "environment variables"),
    **dict.fromkeys(map(str, PATCH_POINTS), "patch points"),
}


@dataclass(frozen=True, slots=True)
class Line:
    """The result of one check.

    Attributes:
        what: what was checked.
        state: its result.
        found: what was found, in words.
    """

    what: str
    state: State
    found: str


@dataclass(frozen=True)
class Report:
    """The results of all checks.

    Attributes:
        healthy: no check failed.
        lines: the checks.
    """

    healthy: bool
    lines: tuple[Line, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--save", metavar="FOLDER", type=local_path, help="also check whether files can be written there"
    )
    parser.add_argument("--all", action="store_true", help="list every environment variable and every patch point")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the checks and print their results."""
    lines = tuple(_lines(arguments.save))
    report = Report(all(item.state != "FAILED" for item in lines), lines)
    if arguments.json:
        print_result("doctor", report, 0 if report.healthy else 1)
    else:
        joined = [[item] for item in lines] if arguments.all else group_by(lines, _kind)
        table((_name(items), Painted(items[0].state, _STYLES[items[0].state]), items[0].found) for items in joined)
        line()
        if len(joined) < len(lines):
            line(f"{quantity(len(lines), 'check')} in {quantity(len(joined), 'line')}; --all lists each check")
        line(_verdict(report))
    return 0 if report.healthy else 1


def _kind(item: Line) -> tuple[str, State, str]:
    """Return what the checks of a joined line have in common.

    That is the group, or the name of a check outside of any group, and the result.
    """
    return _GROUPS.get(item.what, item.what), item.state, item.found


def _name(items: Sequence[Line]) -> str:
    """Return the name of one check, or how many of which group have the same result."""
    return items[0].what if len(items) == 1 else f"{len(items)} {_GROUPS[items[0].what]}"


def _verdict(report: Report) -> Painted:
    """Return the last line, which does not report success if Megatron could not be checked."""
    if not report.healthy:
        return Painted("some checks FAILED, see above", BAD)
    if any(item.found == _NO_MEGATRON for item in report.lines):
        return Painted(f"no check failed, but {_NO_MEGATRON}: run this command where your jobs run", REMARKABLE)
    return Painted("all checks passed", GOOD)


def _lines(save: Path | None) -> Iterator[Line]:
    yield Line("mcore_ckpt_ext", "ok", f"{mcore_ckpt_ext.__version__}, {_folder()}")
    yield from _other_copies()
    yield Line("python", "ok", f"{platform.python_version()}, {sys.executable}")
    try:
        with explain_import_failures():
            import torch
    except Exception as error:  # noqa: BLE001 - doctor reports any error
        yield Line("torch", "FAILED", _import_failure(error))
        return

    version = parse_version(torch.__version__)
    yield Line("torch", "ok" if version and TORCH_IS_SUPPORTED.is_of(version) else "FAILED", torch.__version__)
    yield _megatron()
    for name in ("nvidia-resiliency-ext", "colossalai", "transformer-engine", "safetensors", "isal"):
        installed = installed_version(name)
        yield Line(name, "ok" if installed else "note", installed or "not installed")
    yield from (_setting(setting) for setting in (*SETTINGS, _AUTOLOAD))
    yield _autoload(version)
    yield from _hooks()
    if SWITCH.value:
        yield from _loops()
    if save is not None:
        yield _writable(save)


def _folder() -> Path:
    return Path(mcore_ckpt_ext.__file__).resolve().parent


def _other_copies() -> Iterator[Line]:
    """Report further copies of this package on the path: another process may import another one."""
    for folder, version in sorted(installed_copies(mcore_ckpt_ext.__name__).items()):
        if folder != _folder():
            same = version in (None, mcore_ckpt_ext.__version__)
            hint = f"keep one: pip uninstall {mcore_ckpt_ext.__name__}"
            description = f"{version or 'of unknown version'}, {folder}; {hint}"
            yield Line("another copy", "note" if same else "FAILED", description)


def _import_failure(error: Exception) -> str:
    if isinstance(error, UsageError):
        return f"{error.message}: {error.details['found']}; {error.details['hint']}"
    return f"cannot be imported: {type(error).__name__}: {escape(str(error))}"


def _megatron() -> Line:
    """Report the installed release of Megatron, or a checkout on the path."""
    subject = "megatron-core"
    if installed := installed_version(subject):
        return Line(subject, "ok", installed)
    try:
        spec = find_spec("megatron") and find_spec("megatron.core")
    except Exception as error:  # noqa: BLE001 - `find_spec` imports the parent package, which may fail in any way
        return Line(subject, "FAILED", _import_failure(error))
    if spec is None or spec.origin is None:
        return Line(subject, "note", _NO_MEGATRON)
    return Line(subject, "ok", f"a checkout, {Path(spec.origin).parents[2]}")


def _setting(setting: Setting[Any]) -> Line:
    """Report whether a variable is set, and its effect; an invalid value is ignored."""
    if setting.text is None:
        return Line(setting.name, "ok", "not set")
    quoted = f"{escape(setting.text)!r}"
    if not setting.is_valid:
        return Line(setting.name, "FAILED", f"{quoted}: invalid value, ignored ({setting.meaning})")
    return Line(setting.name, "note", f"{quoted} ({setting.meaning})")


def _autoload(version: Version | None) -> Line:
    """Report whether `import torch` installs the hooks."""
    subject = "torch loads the hooks"
    by_hand = "call mcore_ckpt_ext.install() in the training script"
    if version is None or not TORCH_LOADS_PLUGINS.is_of(version):
        return Line(subject, "note", f"no: torch loads plugins since {TORCH_LOADS_PLUGINS.since}; {by_hand}")
    if not _AUTOLOAD.value:
        return Line(subject, "note", f"no: TORCH_DEVICE_BACKEND_AUTOLOAD=0; {by_hand}")
    if not is_registered():
        hint = f"pip install . in its clone; or {by_hand}"
        return Line(subject, "FAILED", f"no: the package is on the path, but not installed: {hint}")
    if not SWITCH.value:
        return Line(subject, "note", f"no: {SWITCH.name}={SWITCH.text}")
    return Line(subject, "ok", "yes, at the end of `import torch`")


def _hooks() -> Iterator[Line]:
    """Import the modules with patch points, as a job would, and report the state of each patch point."""
    if not SWITCH.value:
        yield Line("hooks", "note", f"switched off: {SWITCH.name}={SWITCH.text}")
        return
    mcore_ckpt_ext.install()
    problems = {
        module: _import_problem(module)
        for module in dict.fromkeys(name for patch_point in PATCH_POINTS for name in patch_point.modules)
    }
    for patch_point, status in zip(PATCH_POINTS, mcore_ckpt_ext.status(), strict=True):
        problem = next(filter(None, (problems[module] for module in patch_point.modules)), None)
        framework = next(name for prefix, name in _DISTRIBUTIONS.items() if patch_point.modules[0].startswith(prefix))
        # Megatron appends the commit of any repository that contains its folder (megatron/core/package_info.py).
        version = f" ({status.version.partition('+')[0]})" if status.version else ""
        if status.state == "patched":
            reason = f"; {status.reason}" if status.reason else ""
            yield Line(status.patch_point, "ok", f"patched{version}{reason}")
        elif status.state == "not needed":
            yield Line(status.patch_point, "ok", f"not needed{version}: {status.reason}")
        elif problem is not None and installed_version(framework) is None:
            yield Line(status.patch_point, "note", f"not installed: {problem}")
        else:
            yield Line(status.patch_point, "FAILED", f"not patched{version}: {status.reason or problem}")


def _loops() -> Iterator[Line]:
    """Report for each training loop whether its own patch points and those of Megatron Core are patched."""
    states = [
        (patch_point.modules[0], status.state)
        for patch_point, status in zip(PATCH_POINTS, mcore_ckpt_ext.status(), strict=True)
    ]
    for distribution, (loop, prefixes) in _LOOPS.items():
        version = installed_version(distribution)
        hooked = all(
            any(state == "patched" for module, state in states if module.startswith(prefix)) for prefix in prefixes
        )
        if version is None:
            yield Line(loop, "note", f"not installed ({distribution})")
        else:
            yield Line(loop, "ok" if hooked else "FAILED", f"{'hooked' if hooked else 'not hooked'}, {version}")


def _import_problem(module: str) -> str | None:
    try:
        # Frameworks print messages while they are imported.
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module(module)
    except Exception as error:  # noqa: BLE001 - doctor reports any error of a framework's import
        return f"{type(error).__name__}: {error}"
    return None


def _writable(folder: Path) -> Line:
    """Report whether the sidecar and conversions can be written to the folder for checkpoints."""
    subject = f"writing in {folder}"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".mcore_ckpt_ext-", suffix=".json") as file:
            file.write(b"{}")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Line(subject, "FAILED", f"{error.strerror}: the sidecar would be missing, a plain resume still works")
    return Line(subject, "ok", "the sidecar can be written")
