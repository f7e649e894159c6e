"""Packages for some jobs only: installed from PyPI by name, in folders outside of the environment."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from megatron_on_cpu.engine_kernels import FOLDER_VARIABLE

ENGINE_VARIABLE = "TE_PATH"
PEFT, ACCELERATE = "0.21.2", "1.15.0"
_ENGINE_VERSION = "2.20.2"
_ENERGON_VERSION = "7.4.1"
_RESILIENCY_VERSION = "0.7.0"
# All that an import of Energon needs and that the tests' environment lacks, as of November 2026.
_BESIDE_ENERGON = (
    "braceexpand==0.1.7", "bracex==3.2.3", "deprecation==2.1.0", "filetype==1.2.0", "jsonschema==4.26.0",
    "jsonschema-specifications==2025.9.1", "lark==1.3.1", "mfusepy==3.1.1", "multi-storage-client==1.3.1",
    "opentelemetry-api==1.45.2", "rapidyaml==0.15.2", "referencing==0.37.0", "rpds-py==2026.9.1", "wcmatch==12.0.1",
    "webdataset==1.0.2", "xattr==1.3.0",
)  # fmt: skip
_TIME_LIMIT = 600


def installed_beside(package: str, version: str, *options: str) -> Path:
    """Return the folder of one release without dependencies, which the first call installs."""
    folder = Path(sys.prefix) / package / version
    if not folder.exists():
        partial = folder.with_name(f"{version}.partial-{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *options]
        command += ["--target", str(partial), f"{package}=={version}"]
        subprocess.run(command, check=True, timeout=_TIME_LIMIT)
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
            shutil.rmtree(partial)
    return folder


def energon() -> Path:
    """Return a folder with megatron-energon and all that it imports."""
    return installed_beside("megatron-energon", _ENERGON_VERSION, "--only-binary=:all:", *_BESIDE_ENERGON)


def resiliency() -> Path:
    """Return a folder with nvidia-resiliency-ext, whose wheels name a newer C library than what jobs import needs."""
    wheels = ("--only-binary=:all:", "--platform", f"manylinux_2_39_{platform.machine()}")
    return installed_beside("nvidia-resiliency-ext", _RESILIENCY_VERSION, *wheels)


@cache
def _engine() -> str:
    """Return the folder of Transformer Engine's Python part; TE_PATH names another release, or a build."""
    return os.environ.get(ENGINE_VARIABLE) or str(installed_beside("transformer-engine", _ENGINE_VERSION))


def engine_version() -> tuple[int, int]:
    """Return the release of Transformer Engine in jobs: major and minor number."""
    (found,) = metadata.distributions(name="transformer-engine", path=[_engine()])
    major, minor, *_ = found.version.split(".")
    return int(major), int(minor)


def with_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide Transformer Engine to jobs that start from here on."""
    monkeypatch.setenv(FOLDER_VARIABLE, _engine())
    # Otherwise its modules refuse the extra states of a checkpoint, whose pickles they load.
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
