"""Megatron releases other than the installed one: checkouts named by MEGATRON_LM_PATH, and cells of the matrix.

A cell (`scripts/matrix_cell.py`) has a wheel of another release installed, and runs the tests of releases with it.
"""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext.versions import Version, parse_version

VARIABLE = "MEGATRON_LM_PATH"
CELL_VARIABLE = "TEST_RELEASES"
_RUNS = f"{VARIABLE}=FOLDER python3 scripts/run_tests.py tests/jobs"
with_checkout = pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"runs the sources of Megatron-LM, of any release, in a checkout: {_RUNS}"
)
with_another_release = pytest.mark.skipif(
    VARIABLE not in os.environ and CELL_VARIABLE not in os.environ,
    reason=f"runs another release of Megatron: python3 scripts/run_tests.py --megatron 0.18.2, or {_RUNS}",
)
EITHER = [pytest.param(False, id="installed"), pytest.param(True, id="checkout", marks=with_checkout)]
"""Parameters of a fixture: without a checkout, and with one if there is any."""


def full_version() -> str:
    """Return the version of the checkout (core_v0.19.0 calls itself 0.19.1), or else of the installed Megatron."""
    if VARIABLE not in os.environ:
        return metadata.version("megatron-core")
    text = (Path(os.environ[VARIABLE]) / "megatron" / "core" / "package_info.py").read_text()
    return ".".join(re.search(rf"^{part} = (\d+)", text, re.MULTILINE)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def release_of(checkout: bool) -> Version:
    """Return the release of the checkout, or of the installed Megatron."""
    release = parse_version(full_version() if checkout else metadata.version("megatron-core"))
    assert release is not None
    return release


def installed_is_before(major: int, minor: int) -> bool:
    """Return whether the installed Megatron is older than a release, and cannot read formats that it introduced."""
    return tuple(int(part) for part in metadata.version("megatron-core").split(".")[:2]) < (major, minor)


def version() -> str | None:
    """Return the checkout's major and minor version; None without a checkout."""
    return full_version().rpartition(".")[0] if VARIABLE in os.environ else None


def only_for(*versions: str) -> pytest.MarkDecorator:
    """Mark tests that apply to these versions (major and minor) only."""
    found = version()
    reason = f"is about Megatron-LM {' and '.join(versions)} alone, in a checkout of it: {_RUNS}"
    return pytest.mark.skipif(found not in versions, reason=reason)


def optimizers_of_checkout() -> str:
    """Return the source code that creates a job's optimizers."""
    return (Path(os.environ[VARIABLE]) / "megatron" / "core" / "optimizer" / "__init__.py").read_text()


def checkout_job() -> dict[str, Any]:
    """Return how to run the checkout's own script: arguments of `run_job` and of its callers.

    Returns:
        Empty without a checkout, so that the installed Megatron runs.
    """
    if VARIABLE not in os.environ:
        return {}
    checkout = Path(os.environ[VARIABLE])
    return {"script": checkout / "pretrain_gpt.py", "megatron": checkout}
