"""Test what this package takes for the release of the running Megatron Core."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.megatron.running_version import megatron_version


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("megatron.core")
    monkeypatch.setitem(sys.modules, "megatron.core", module)
    return module


@pytest.mark.parametrize(("text", "version"), [("0.16.1", (0, 16)), ("0.19.0rc3+abc", (0, 19)), ("1.0", (1, 0))])
def test_the_version_of_megatron(megatron: ModuleType, text: str, version: tuple[int, int]) -> None:
    megatron.__version__ = text  # type: ignore[attr-defined]
    assert megatron_version() == version


@pytest.mark.parametrize("text", ["dev", None])
def test_an_unknown_version_is_refused(megatron: ModuleType, text: str | None) -> None:
    if text is not None:
        megatron.__version__ = text  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedCheckpointError, match="has no version"):
        megatron_version()
