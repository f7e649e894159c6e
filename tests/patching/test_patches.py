"""Test the patches for forks on the genuine framework: they apply, revert, and enable the hooks."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PATCHES = sorted((REPOSITORY / "patches").glob("*.patch"))
# The published wheel differs from core_v0.19.0 in nothing that the patch touches.
PATCH = REPOSITORY / "patches" / "megatron-lm-core_v0.19.0.patch"
IMPORT = """
import torch, megatron.training.checkpointing, mcore_ckpt_ext
print(any(point.state == "patched" for point in mcore_ckpt_ext.status()))
"""


def is_served(folder: Path) -> bool:
    """Whether the hooks are in place in a process with Megatron from a folder, torch's autoload switched off.

    `test_autoload` shows that without it they are not.
    """
    paths = os.pathsep.join([str(folder), str(REPOSITORY)])
    environment = os.environ | {"PYTHONPATH": paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1] == "True"


def git_apply(patch: Path, folder: Path, *more: str) -> None:
    subprocess.run(["git", "apply", "--unidiff-zero", *more, str(patch)], cwd=folder, check=True)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_adds_our_lines_and_carries_nothing_of_the_framework(patch: Path) -> None:
    body = patch.read_text().partition("\n@@")[2].splitlines()[1:]
    assert body and all(line.startswith("+") for line in body)
    assert any("install()" in line for line in body)


@pytest.mark.thorough
def test_a_patched_megatron_switches_the_hooks_on(tmp_path: Path) -> None:
    found = importlib.util.find_spec("megatron.training")
    assert found is not None and found.origin is not None
    shutil.copytree(Path(found.origin).parents[1], tmp_path / "megatron", copy_function=os.symlink)
    patched = tmp_path / "megatron" / "training" / "__init__.py"
    before = patched.read_bytes()
    patched.unlink()
    patched.write_bytes(before)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    git_apply(PATCH, tmp_path)
    assert is_served(tmp_path)
    git_apply(PATCH, tmp_path, "--reverse")
    assert patched.read_bytes() == before


@pytest.mark.parametrize("variable", ["MEGATRON_LM_PATH", "COLOSSALAI_PATH"])
def test_the_patches_fit_a_checkout(variable: str) -> None:
    checkout = os.environ.get(variable)
    if not checkout:
        pytest.skip(f"applies the patches to a checkout: {variable}=FOLDER python3 scripts/run_tests.py tests/patching")
    script = REPOSITORY / "scripts" / "check_patches.sh"
    done = subprocess.run([str(script), checkout], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "applied and taken back" in done.stdout


def test_the_script_says_when_there_was_nothing_to_check(tmp_path: Path) -> None:
    script = REPOSITORY / "scripts" / "check_patches.sh"
    done = subprocess.run([str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no patch was checked" in done.stderr
