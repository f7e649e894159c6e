"""Test the public API: the exact list, typed without `Any`, documented, with examples that run."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mcore_ckpt_ext
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.formats.parts import UnreadKeys
from tests.harness.checkpoints import fixture_named

PUBLIC = {
    "__version__",
    # what it does
    "choose_layout", "compare", "convert", "inspect", "install", "load_optimizer", "open_checkpoint", "plan",
    "save_sidecar", "status", "uninstall", "verify",
    # what a conversion can write, and what a user knows of its source
    "Canonical", "Facts", "FsdpDtensor", "HuggingFace", "Legacy", "TorchDist",
    # the options of what it does
    "ComparisonOptions", "ConversionOptions", "PlanOptions", "VerificationOptions",
    # what the results are made of
    "BufferMap", "Check", "Checkpoint", "ChosenLayout", "Comparison", "DifferenceMap", "Evidence", "Finding",
    "Inspection", "KindComparison", "LayoutPlan", "Memory", "MetadataComparison", "PaddingRows", "ParallelLayout",
    "PatchPointStatus", "PlannedLayout", "Region", "Report", "Resumption",
    "Setting", "Stage", "StoredFile", "StoredTensor", "TensorDifference", "TensorHandle", "UnreadState",
    "Verification", "Writer",
    # the errors
    "CheckpointError", "DestinationError", "ModelMismatchError", "PackingError", "ProofError", "ResumeRefusedError",
    "SaveFailedError", "StorageError", "UnknownNameError", "UnreadableCheckpointError", "UnsafePickleError",
    "UnsupportedCheckpointError", "UsageError",
}  # fmt: skip
WITH_EXAMPLE = sorted(name for name in PUBLIC if name[0].islower()) + sorted(
    ["Canonical", "FsdpDtensor", "HuggingFace", "Legacy", "TorchDist", "CheckpointError"]
)
# Of an open checkpoint a user needs these; formats have more, for the rest of the package.
OF_CHECKPOINTS = ("kinds", "names", "tensor")
OF_HANDLES = ("read",)


def test_the_list() -> None:
    assert set(mcore_ckpt_ext.__all__) == PUBLIC
    assert all(getattr(mcore_ckpt_ext, name) is not None for name in PUBLIC)
    assert set(dir(mcore_ckpt_ext)) >= PUBLIC


def test_type_checkers_see_the_same_names() -> None:
    """The imports under TYPE_CHECKING, and the table of homes that serves them."""
    tree = ast.parse(Path(mcore_ckpt_ext.__file__).read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    homes = {name.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert homes == mcore_ckpt_ext._MODULES
    assert homes.keys() | {"__version__"} == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_everything_is_documented(name: str) -> None:
    found = getattr(mcore_ckpt_ext, name)
    assert found.__doc__
    assert not found.__doc__.startswith((f"{name}(", "See "))


def contains_any(hint: object) -> bool:
    return hint is typing.Any or any(contains_any(part) for part in typing.get_args(hint))


def hinted() -> list[object]:
    found = [getattr(mcore_ckpt_ext, name) for name in sorted(PUBLIC - {"__version__", "Checkpoint", "TensorHandle"})]
    found = [item for item in found if not (isinstance(item, type) and issubclass(item, Exception))]
    found += [getattr(mcore_ckpt_ext.Checkpoint, name) for name in OF_CHECKPOINTS]
    found.append(UnreadKeys.__call__)  # of `files.unread`
    return found + [getattr(mcore_ckpt_ext.TensorHandle, name) for name in OF_HANDLES]


@pytest.mark.parametrize("found", hinted(), ids=lambda found: found.__name__)
def test_types_hide_nothing(found: object) -> None:
    # Imported for type checkers only: by the hooks, and so that `inspect` starts without the families.
    names = {"PatchPointStatus": mcore_ckpt_ext.PatchPointStatus, "Family": Family}
    hints = typing.get_type_hints(found, localns=names)
    assert hints
    assert not [name for name, hint in hints.items() if contains_any(hint)]
    if inspect.isfunction(found):
        assert "return" in hints
        assert hints.keys() - {"return"} == {name for name in inspect.signature(found).parameters if name != "self"}
    else:
        assert dataclasses.is_dataclass(found) or issubclass(found, tuple)


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """The folder in which examples run, with a real checkpoint called `run`; and the names that they may use."""
    shutil.copytree(fixture_named("p02").run, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    public = {name: getattr(mcore_ckpt_ext, name) for name in PUBLIC}
    installed = any(patch_point.state != "not patched" for patch_point in mcore_ckpt_ext.status())
    yield {**public, "torch": torch}
    if installed:
        mcore_ckpt_ext.install()
    else:
        mcore_ckpt_ext.uninstall()


@pytest.mark.thorough
@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_the_example_of(name: str, examples: dict[str, object]) -> None:
    found = getattr(mcore_ckpt_ext, name)
    test = doctest.DocTestParser().get_doctest(found.__doc__, examples, name, None, 0)
    assert test.examples
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    assert not told, "".join(told)
