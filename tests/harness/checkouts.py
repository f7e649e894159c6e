"""Checkouts of Megatron-LM that are named by MEGATRON_LM_PATH, and tests that need one."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "MEGATRON_LM_PATH"
with_checkout = pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no checkout")
EITHER = [pytest.param(False, id="installed"), pytest.param(True, id="checkout", marks=with_checkout)]
"""Parameters of a fixture: whether it runs a checkout, which it does where there is one."""


def full_version() -> str:
    """The checkout's own number (core_v0.19.0 calls itself 0.19.1)."""
    text = (Path(os.environ[VARIABLE]) / "megatron" / "core" / "package_info.py").read_text()
    return ".".join(re.search(rf"^{part} = (\d+)", text, re.MULTILINE)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def version() -> str | None:
    """Its major and minor number; None without a checkout."""
    return full_version().rpartition(".")[0] if VARIABLE in os.environ else None


def only_for(*versions: str) -> pytest.MarkDecorator:
    """For tests that say something of these versions (major and minor) alone."""
    found = version()
    reason = f"{VARIABLE} names {'no checkout' if found is None else found}, this test is for {' and '.join(versions)}"
    return pytest.mark.skipif(found not in versions, reason=reason)


def optimizers_of_checkout() -> str:
    """The source that chooses a job's optimizers."""
    return (Path(os.environ[VARIABLE]) / "megatron" / "core" / "optimizer" / "__init__.py").read_text()


def checkout_job() -> dict[str, Any]:
    """How the checkout's own script is run: arguments of `run_job` and of what calls it."""
    checkout = Path(os.environ[VARIABLE])
    return {"script": checkout / "pretrain_gpt.py", "megatron": checkout}
