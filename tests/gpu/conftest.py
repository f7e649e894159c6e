"""All tests of this folder need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt_ext.devices import accelerator_type

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here, and say why."""
    if accelerator_type() is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="there is no GPU here"))
