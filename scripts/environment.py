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
# ColossalAI's last release pins torch and uvicorn to versions it does not need; what it really imports stands apart.
COLOSSALAI = ("colossalai==0.5.0", "galore_torch==1.0")
COLOSSALAI_NEEDS = (
    "accelerate==1.15.0", "bitsandbytes==0.50.2", "click", "contexttimer==0.3.3", "einops", "numpy", "packaging",
    "peft==0.13.2", "psutil", "pydantic", "rich", "safetensors", "tqdm", "transformers==4.51.3",
)  # fmt: skip
# megatron-core 0.17 and later declare Python 3.12; their wheels hold a helper compiled for it.
PYTHON = (3, 12)


class SetupError(RuntimeError):
    """The environment cannot be made; the message says what was looked for."""


def prepared(folder: Path, extras: str, log: Path) -> Path:
    """The interpreter of a virtual environment in `folder` that holds this package with some of its extras.

    An environment made earlier is used again; pip then finds everything in place. Programs that are started hereafter
    keep what they compile, whatever the user's own environment says.

    Args:
        folder: where the environment is, or will be.
        extras: `demo` or `demo,test,docs`, as in pyproject.toml.
        log: pip's output.

    Raises:
        SetupError: no fitting interpreter, or the installation failed.
    """
    # What is installed is compiled once, when it is first imported, by whichever program.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    python = folder / "bin" / "python"
    if not python.exists():
        # Python 3.12's own pip takes three times as long to see which releases fit.
        subprocess.run([find_python(), "-m", "venv", "--upgrade-deps", str(folder)], check=True)
    _pip_install(python, log, "-e", f"{REPOSITORY}[{extras}]")
    return python


def prepared_beside(base: Path, folder: Path, log: Path) -> Path:
    """The interpreter of a second environment, with ColossalAI and the transformers it wants, before those of the
    first.

    Whatever it does not have itself, torch above all, comes from the first.

    Args:
        base: the interpreter of the first environment, as `prepared` gives it.
        folder: where the second is, or will be.
        log: pip's output.

    Raises:
        SetupError: the installation failed.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([str(base), "-m", "venv", "--upgrade-deps", str(folder)], check=True)
    ours, theirs = _packages_folder(python), _packages_folder(base)
    # As a site folder, not as a mere path: an editable installation is found by a file in it.
    (ours / "beside.pth").write_text(f"import site; site.addsitedir({str(theirs)!r})\n")
    _pip_install(python, log, *COLOSSALAI_NEEDS)
    _pip_install(python, log, "--no-deps", *COLOSSALAI)
    return python


def _pip_install(python: Path, log: Path, *what: str) -> None:
    # Most of what is installed is never imported, and need not be compiled.
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", *what]
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        tail = "\n".join(log.read_text().splitlines()[-12:])
        raise SetupError(f"pip failed; its last lines ({log}):\n{tail}")


def _packages_folder(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


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
