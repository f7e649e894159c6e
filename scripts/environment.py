"""A virtual environment with this package and the real frameworks, on a machine that has nothing but Python.

Used by the demonstration and by the test command; standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
# megatron-core 0.17 and later declare Python 3.12; their wheels hold a helper compiled for it.
PYTHON = (3, 12)


class SetupError(RuntimeError):
    """The environment cannot be made; the message says what was looked for."""


def prepared(folder: Path, extras: str, log: Path) -> Path:
    """The interpreter of a virtual environment in `folder` that holds this package with some of its extras.

    An environment made earlier is used again; pip then finds everything in place.

    Args:
        folder: where the environment is, or will be.
        extras: `demo` or `demo,test`, as in pyproject.toml.
        log: pip's output.

    Raises:
        SetupError: no fitting interpreter, or the installation failed.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([find_python(), "-m", "venv", str(folder)], check=True)
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-e", f"{REPOSITORY}[{extras}]"]
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        tail = "\n".join(log.read_text().splitlines()[-12:])
        raise SetupError(f"pip failed; its last lines ({log}):\n{tail}")
    return python


def find_python() -> str:
    """An interpreter of the version that Megatron's release needs.

    Raises:
        SetupError: there is none.
    """
    looked_at = []
    for candidate in _candidates():
        version = _version(candidate)
        looked_at.append(f"{candidate}: {'.'.join(map(str, version)) if version else 'does not run'}")
        if version == PYTHON:
            return candidate
    wanted = ".".join(map(str, PYTHON))
    raise SetupError(f"Python {wanted} is needed (megatron-core 0.19 declares it); found only " + "; ".join(looked_at))


def _candidates() -> Iterator[str]:
    name = f"python{PYTHON[0]}.{PYTHON[1]}"
    yield sys.executable
    if found := shutil.which(name):
        yield found
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for folder in sorted(versions.glob(f"{PYTHON[0]}.{PYTHON[1]}*"), reverse=True):
        yield str(folder / "bin" / "python")


def _version(python: str) -> tuple[int, ...] | None:
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    except OSError:
        return None
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else None
