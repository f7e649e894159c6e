"""Throw-away frameworks to hook into, and a throw-away installation of this package."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]

FRAMEWORK = """
def load(model, optimizer, strict=True):
    "Load."
    return ("stock", model)

def untouched():
    return "stock"
"""

TRAINER = """
from {name}.checkpointing import load

def train():
    return load("m", "o")
"""

WRAPPERS = """
from functools import wraps

def wrap(original):
    @wraps(original)
    def load(*args, **kwargs):
        return ("ours", *original(*args, **kwargs))
    return load

def wrap_badly(original):
    raise RuntimeError("no wrapper today")

def wrap_with_nothing(original):
    return None
"""


class Framework:
    """A package with ``checkpointing.load`` and a ``training`` module that imports it by name."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir()
        (self.folder / "__init__.py").write_text("__version__ = '1.2.3'\n")
        self.write("checkpointing", FRAMEWORK)
        self.write("training", TRAINER.format(name=name))
        self.write("wrappers", WRAPPERS)

    def write(self, module: str, source: str) -> None:
        (self.folder / f"{module}.py").write_text(source)

    def loaded(self, module: str) -> ModuleType:
        return sys.modules[f"{self.name}.{module}"]


@pytest.fixture
def framework(tmp_path, monkeypatch, request):
    monkeypatch.syspath_prepend(str(tmp_path))
    # A rewritten source of the same size in the same second would be served from its old byte code.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = Framework(tmp_path, "framework_" + "".join(c if c.isalnum() else "_" for c in request.node.name))
    yield made
    for name in [name for name in sys.modules if name.split(".")[0] == made.name]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def installation(tmp_path_factory):
    """A folder for PYTHONPATH with this package's metadata, made by its own build backend."""
    folder = tmp_path_factory.mktemp("site")
    code = "import sys, setuptools.build_meta as build; build.prepare_metadata_for_build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=REPOSITORY, check=True, capture_output=True)
    return folder


@pytest.fixture
def python(installation):
    """Run code in a fresh interpreter in which this package is installed; return the finished process."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        paths = [str(installation), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        clean = {k: v for k, v in os.environ.items() if k not in {"MCORE_CKPT_EXT", "RANK"}}
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=installation,  # the repository itself may hold metadata of an older build
            env={**clean, "PYTHONPATH": os.pathsep.join(paths), **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
