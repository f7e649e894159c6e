"""Test which tests a change selects: those that import the changed module, or the nearest indirect ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from changed_tests import changed_files, importers, module_of, nearest_tests, rings_of_tests

REPOSITORY = Path(__file__).parents[2]
IMPORTING = {
    "mcore_ckpt_ext.leaf": {"mcore_ckpt_ext/middle.py", "tests/one/test_leaf.py"},
    "mcore_ckpt_ext.middle": {"mcore_ckpt_ext/top.py", "tests/one/test_middle.py", "tests/jobs/test_job.py"},
    "mcore_ckpt_ext.untested": {"mcore_ckpt_ext/middle.py"},
    "mcore_ckpt_ext.in_jobs": {"tests/jobs/test_job.py"},
    "tests.harness.models": {"tests/one/test_leaf.py"},
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["mcore_ckpt_ext/leaf.py"], ["tests/one/test_leaf.py"]),
        (["mcore_ckpt_ext/untested.py"], ["tests/one/test_middle.py"]),
        (["mcore_ckpt_ext/middle.py"], ["tests/one/test_middle.py"]),
        (["mcore_ckpt_ext/in_jobs.py"], []),
        (["tests/jobs/test_job.py"], ["tests/jobs/test_job.py"]),
        (["tests/harness/models.py"], ["tests/one/test_leaf.py"]),
        (["README.md", "mcore_ckpt_ext/alone.py"], []),
    ],
)
def test_nearest_tests(changed: list[str], expected: list[str]) -> None:
    assert nearest_tests(changed, IMPORTING) == expected


def test_rings_of_tests() -> None:
    rings = rings_of_tests(["mcore_ckpt_ext/leaf.py"], IMPORTING, without=())
    assert list(rings) == [["tests/one/test_leaf.py"], ["tests/jobs/test_job.py", "tests/one/test_middle.py"]]


@pytest.mark.thorough
def test_imports_of_this_repository() -> None:
    found = importers(REPOSITORY)
    assert "tests/layout/test_grad_buffer.py" in found["mcore_ckpt_ext.layout.grad_buffer"]
    # By name alone: the command line imports the command that is given, and frameworks are patched from a list.
    assert "mcore_ckpt_ext/cli/main.py" in found["mcore_ckpt_ext.cli.verify"]
    assert "mcore_ckpt_ext/megatron/patch_points.py" in found["mcore_ckpt_ext.megatron.load"]
    assert module_of("mcore_ckpt_ext/layout/__init__.py") == "mcore_ckpt_ext.layout"


def test_circular_imports_end() -> None:
    importing = {"mcore_ckpt_ext.a": {"mcore_ckpt_ext/b.py"}, "mcore_ckpt_ext.b": {"mcore_ckpt_ext/a.py"}}
    assert nearest_tests(["mcore_ckpt_ext/a.py"], importing) == []


def test_changed_files(tmp_path: Path) -> None:
    """Committed on a branch, changed and not yet committed, not yet tracked."""

    def git(*command: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--initial-branch", "main")
    for name in ("kept.py", "committed.py", "changed.py"):
        (tmp_path / name).write_text("1\n")
    git("add", ".")
    git("commit", "-m", "Begin")
    git("checkout", "-b", "branch")
    (tmp_path / "committed.py").write_text("2\n")
    git("commit", "-am", "Change")
    (tmp_path / "changed.py").write_text("2\n")
    (tmp_path / "new.py").write_text("1\n")
    assert changed_files(tmp_path) == ["changed.py", "committed.py", "new.py"]
