"""Creates a virtual environment with this package and the real frameworks on a machine with only Python.

Used by the demonstration and by the test command; standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
# ColossalAI's last release pins torch and uvicorn to versions that it does not need; its real imports are listed
# separately.
COLOSSALAI = ("colossalai==0.5.0", "galore_torch==1.0")
COLOSSALAI_NEEDS = (
    "accelerate==1.15.0", "bitsandbytes==0.50.2", "click", "contexttimer==0.3.3", "einops", "numpy", "packaging",
    "peft==0.13.2", "psutil", "pydantic", "rich", "safetensors", "tqdm", "transformers==4.51.3",
)  # fmt: skip
# megatron-core 0.17 and later require Python 3.12; their wheels contain a helper compiled for it.
PYTHON = (3, 12)


class SetupError(RuntimeError):
    """The environment cannot be created; the message has the reason."""


def prepared(
    folder: Path,
    extras: str,
    log: Path,
    *,
    pins: Sequence[str] = (),
    replaced: Sequence[str] = (),
    version: tuple[int, ...] = PYTHON,
) -> Path:
    """Prepare a virtual environment in `folder` with this package and some extras, and return its interpreter.

    An existing environment is reused. Programs that are started afterwards write bytecode, regardless of the user's
    environment.

    Args:
        folder: folder of the environment.
        extras: `demo` or `demo,test,docs`, as in pyproject.toml.
        log: file for pip's output.
        pins: releases of other packages, like `torch==2.9.1`.
        replaced: releases to install afterwards, whatever other packages declare.
        version: version of Python, major and minor.

    Raises:
        SetupError: there is no suitable interpreter, or the installation failed.
    """
    # Installed modules are compiled when they are first imported.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    python = folder / "bin" / "python"
    if not python.exists():
        # Python 3.12's own pip takes three times as long to resolve releases.
        subprocess.run([find_python(version), "-m", "venv", "--upgrade-deps", str(folder)], check=True)
    _pip_install(python, log, "-e", f"{REPOSITORY}[{extras}]", *pins)
    if replaced:
        _pip_install(python, log, "--no-deps", *replaced)
    return python


def prepared_beside(base: Path, folder: Path, log: Path) -> Path:
    """Prepare a second environment with ColossalAI and its transformers, and return its interpreter.

    All other packages, such as torch, come from the first environment.

    Args:
        base: the interpreter of the first environment, as `prepared` gives it.
        folder: where the second is, or will be.
        log: pip's output.

    Raises:
        SetupError: the installation failed.
    """
    python = _environment_of(base, folder)
    _add_packages(python, _packages_folder(base))
    _pip_install(python, log, *COLOSSALAI_NEEDS)
    _pip_install(python, log, "--no-deps", *COLOSSALAI)
    return python


def prepared_with_megatron(base: Path, folder: Path, release: str, log: Path) -> Path:
    """Prepare an environment with another release of Megatron Core, and return its interpreter.

    Args:
        base: the interpreter of the first environment, as `prepared` gives it.
        folder: where the second is, or will be.
        release: of megatron-core on PyPI.
        log: pip's output.

    Raises:
        SetupError: the installation failed.
    """
    python = _environment_of(base, folder)
    # `megatron` is a namespace package: modules of the other release would be found as well if its folder were visible.
    links = folder / "beside" / "site-packages"
    shutil.rmtree(links, ignore_errors=True)
    links.mkdir(parents=True)
    for entry in _packages_folder(base).iterdir():
        if not entry.name.startswith("megatron"):
            (links / entry.name).symlink_to(entry)
    _add_packages(python, links)
    _pip_install(python, log, "--no-deps", f"megatron-core=={release}")
    return python


def _environment_of(base: Path, folder: Path) -> Path:
    """Create an environment with the same Python as another one if needed, and return its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([str(base), "-m", "venv", "--upgrade-deps", str(folder)], check=True)
    return python


def _add_packages(python: Path, folder: Path) -> None:
    """Make an environment find the packages of a folder after its own."""
    # As a site folder instead of a path, because an editable installation is found by a file in it.
    (_packages_folder(python) / "beside.pth").write_text(f"import site; site.addsitedir({str(folder)!r})\n")


def _pip_install(python: Path, log: Path, *what: str) -> None:
    # Most installed modules are never imported and need not be compiled.
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


def find_python(wanted: tuple[int, ...] = PYTHON) -> str:
    """Return an interpreter of a version (major and minor); by default that of Megatron's release.

    Raises:
        SetupError: there is no such interpreter.
    """
    looked_at = []
    for candidate in _candidates(".".join(map(str, wanted))):
        version = _version(candidate)
        looked_at.append(f"{candidate}: {'.'.join(map(str, version)) if version else 'does not run'}")
        if version == wanted:
            return candidate
    reason = " (megatron-core 0.19 declares it)" if wanted == PYTHON else ""
    name = ".".join(map(str, wanted))
    raise SetupError(f"Python {name} is needed{reason}; found only " + "; ".join(looked_at))


def _candidates(version: str) -> Iterator[str]:
    yield sys.executable
    if found := shutil.which(f"python{version}"):
        yield found
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for folder in sorted(versions.glob(f"{version}.*"), reverse=True):
        yield str(folder / "bin" / "python")


def _version(python: str) -> tuple[int, ...] | None:
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    except OSError:
        return None
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else None


def folders_of_demonstration(description: str | None) -> list[Path]:
    """Parse the command line of a demonstration: a folder for its results, and perhaps a checkout of Megatron-LM."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="for the results")
    parser.add_argument("megatron", nargs="?", type=Path, help="a checkout of Megatron-LM, 0.16 or later")
    arguments = parser.parse_args()
    return [folder for folder in (arguments.folder, arguments.megatron) if folder is not None]
