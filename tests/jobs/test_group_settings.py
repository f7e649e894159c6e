"""Test parameter groups that lack a setting, as ms-swift 4.1 and 4.2 omit `lr_mult`, or that differ in rates alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron_on_cpu.dump_optimizer import parameter_settings

from mcore_ckpt_ext import TorchDist
from mcore_ckpt_ext.operations.conversion import convert
from tests.harness.checkouts import EITHER, checkout_job, full_version
from tests.harness.jobs import (
    OFF,
    RANK_SCRIPTS,
    SAVED,
    Job,
    assert_same_optimizer,
    assert_same_training_state,
    resume,
    run_job,
    train_and_save,
)
from tests.harness.layouts import Layout

pytestmark = pytest.mark.nightly

LAYOUT = Layout(1, 2, 4)


@pytest.fixture(scope="module", params=EITHER)
def megatron(request: pytest.FixtureRequest) -> dict[str, Any]:
    return checkout_job() if request.param else {}


@pytest.fixture(scope="module", params=["lr_mult", "wd_mult"])
def saved(request: pytest.FixtureRequest, megatron: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp(request.param)
    environment = {"TEST_REMOVED_SETTING": request.param}
    plugins = [RANK_SCRIPTS / "without_multiplier.py"]
    options = {"until": SAVED + 1, "plugins": plugins, "environment": environment, **megatron}
    return train_and_save(folder / "saved", LAYOUT, **options)


def test_stock_does_not_find_its_groups(saved: Job, megatron: dict[str, Any], tmp_path: Path) -> None:
    assert run_job(tmp_path / "stock", LAYOUT, load=saved.run, environment=OFF, **megatron).returncode != 0


@pytest.mark.parametrize("layout", [LAYOUT, Layout(2, 1, 4)], ids=["same layout", "other layout"])
def test_it_is_resumed(saved: Job, layout: Layout, megatron: dict[str, Any], tmp_path: Path) -> None:
    """A missing multiplier is 1, and that of weight decay 0 where the group has none and another has."""
    resumed = resume(tmp_path / "resumed", layout, saved.run, **megatron)
    assert_same_optimizer(saved.at_save, resumed.at_load)
    expected, found = parameter_settings(saved.at_save), parameter_settings(resumed.at_load)
    assert {name: settings["weight_decay"] for name, settings in found.items()} == {
        name: settings["weight_decay"] for name, settings in expected.items()
    }
    assert resumed.losses[SAVED + 1] == pytest.approx(saved.losses[SAVED + 1], rel=1e-4)


def test_converted_groups_are_complete(saved: Job, megatron: dict[str, Any], tmp_path: Path) -> None:
    version = full_version() if megatron else None
    convert(saved.iteration, tmp_path / "out", TorchDist(megatron_version=version) if version else TorchDist())
    resumed = resume(tmp_path / "stock", LAYOUT, tmp_path / "out", environment=OFF, **megatron)
    assert_same_optimizer(saved.at_save, resumed.at_load)


@pytest.mark.parametrize("layout", [LAYOUT, Layout(2, 1, 4)], ids=["same layout", "other layout"])
def test_each_group_keeps_its_rate(layout: Layout, megatron: dict[str, Any], tmp_path: Path) -> None:
    """Stock Megatron 0.16 trains on with one rate for all: it compares nothing else in which its groups differ."""
    options = {"more": ["--decoupled-lr", "5e-4"], "until": SAVED + 2, **megatron}
    trained = train_and_save(tmp_path / "saved", LAYOUT, **options)
    resumed = resume(tmp_path / "resumed", layout, trained.run, **options)
    rates = {settings["max_lr"] for settings in parameter_settings(trained.at_save).values()}
    assert rates == {1e-3, 5e-4}
    assert_same_training_state(trained.at_save, resumed.at_load)
    assert resumed.losses[SAVED + 2] == pytest.approx(trained.losses[SAVED + 2], rel=1e-4)
