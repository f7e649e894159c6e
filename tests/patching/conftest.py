"""Temporary frameworks to patch."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

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
