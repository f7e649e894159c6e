"""Test which run folder a load takes, and when it takes weights only."""

from __future__ import annotations

from types import SimpleNamespace

import megatron.core
import pytest

from mcore_ckpt_ext.megatron.run_folder import run_folder


@pytest.mark.parametrize(("frozen", "running", "weights_only"), [
    (False, "0.19.2", False),
    (True, "0.19.2", False),
    (False, "0.20.0", False),
    (True, "0.20.0", True),
])  # fmt: skip
def test_a_job_that_trains_nothing_takes_weights_only(
    frozen: bool, running: str, weights_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", running)
    arguments = SimpleNamespace(load="run", freeze_all_layers=frozen)
    assert run_folder({"checkpoint_exists": bool}, arguments, "load") == ("run", weights_only)


@pytest.mark.parametrize(("directory", "pretrained", "found"), [
    ("run", "other", ("run", False)),
    ("", "other", ("other", True)),
    ("", "", ("", False)),
    ("", None, ("", False)),
])  # fmt: skip
def test_a_pretrained_checkpoint_is_taken_if_the_run_has_none(
    directory: str, pretrained: str | None, found: tuple[str, bool]
) -> None:
    arguments = SimpleNamespace(load=directory, pretrained_checkpoint=pretrained)
    assert run_folder({"checkpoint_exists": bool}, arguments, "load") == found
