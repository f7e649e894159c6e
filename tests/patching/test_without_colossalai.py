"""Test that this package imports without ColossalAI, and that `install` then names what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

ABSENT = "import sys; sys.modules['colossalai'] = None; "


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.thorough
def test_status_and_names_need_nothing_and_install_says_what_is_missing() -> None:
    done = _run(
        ABSENT + "from mcore_ckpt_ext import zero_strict_state_dict as z; "
        "print(*{point.state for point in z.status()}); print(z.get_static_torch_model.__name__); z.install()"
    )
    assert done.stdout.splitlines() == ["not patched", "get_static_torch_model"], done.stderr
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "ZeroDDP or GeminiDDP is not available" in last
    assert "pip install colossalai==0.5.0" in last


def test_importing_it_imports_neither_torch_nor_colossalai() -> None:
    looks = "import sys, mcore_ckpt_ext.zero_strict_state_dict as strict; dir(strict); "
    assert _run(looks + "print({'torch', 'colossalai'} & set(sys.modules))").stdout.strip() == "set()"
