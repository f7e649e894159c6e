"""Test settings that a resume restores: each difference makes two checkpoints different."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import without_digests


@pytest.fixture(scope="module")
def canonical(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings") / "folder"
    mcore_ckpt_ext.convert(fixture_named("p02").run, folder, mcore_ckpt_ext.Canonical())
    return without_digests(folder)


@pytest.fixture
def changed(canonical: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], None]], Path]:
    """A copy whose `common.json` is changed."""

    def copy(change: Callable[[dict[str, Any]], None]) -> Path:
        folder = tmp_path / "copy"
        folder.mkdir()
        for path in canonical.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        about = json.loads((folder / "common.json").read_text())
        change(about)
        (folder / "common.json").write_text(json.dumps(about))
        return folder

    return copy


def of_groups(key: str, value: Any, group: int = 0) -> Callable[[dict[str, Any]], None]:
    return lambda about: about["param_groups"][group].update({key: value})


def of_scheduler(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda about: about["common"]["opt_param_scheduler"].update({key: value})


def of_arguments(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda about: about["common"]["args"]["$namespace"].update({key: value})


def exchange_rates(about: dict[str, Any]) -> None:
    """Each value is still there, in another group."""
    for group in about["param_groups"]:
        group["lr_mult"] = 1.0 + group["wd_mult"]


def another_random_state(about: dict[str, Any]) -> None:
    place, state = about["random_states"][0]
    about["random_states"][0] = [place, [*state, 1] if isinstance(state, list) else {**state, "more": 1}]


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "lr": of_groups("lr", 0.5),
    "weight_decay": of_groups("weight_decay", 0.5),
    "eps": of_groups("eps", 1e-3),
    "betas": of_groups("betas", [0.5, 0.5]),
    "wd_mult": of_groups("wd_mult", 3.0),
    "lr_mult": of_groups("lr_mult", 3.0),
    "max_lr": of_groups("max_lr", 0.5),
    "step": of_groups("step", 99),
    "scheduler: num_steps": of_scheduler("num_steps", 92),
    "scheduler: end_wd": of_scheduler("end_wd", 0.5),
    "consumed train samples": of_arguments("consumed_train_samples", 7),
    "grad scaler": lambda about: about.update({"grad_scaler": {"scale": 2.0}}),
    "random states": another_random_state,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_differs(
    name: str,
    canonical: Path,
    changed: Callable[[Callable[[dict[str, Any]], None]], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = changed(CHANGES[name])
    found = mcore_ckpt_ext.compare(canonical, folder)
    assert found.tensors_equal
    assert found.settings_equal is False
    assert not found.equal
    assert name in [setting.name for setting in found.settings if not setting.equal]
    assert main(["diff", str(canonical), str(folder)]) == 1
    assert f"DIFFERENT SETTINGS, tensors equal in every bit: {name}" in capsys.readouterr().out
    assert main(["diff", str(canonical), str(folder), "--tensors-only"]) == 0
    assert "not part of the verdict" in capsys.readouterr().out
    assert mcore_ckpt_ext.compare(canonical, folder, kinds=["weight"]).equal


def test_values_in_other_groups(canonical: Path, changed: Callable[[Callable[[dict[str, Any]], None]], Path]) -> None:
    folder = changed(exchange_rates)
    twin = mcore_ckpt_ext.compare(folder, folder)
    assert twin.equal
    assert [one.name for one in mcore_ckpt_ext.compare(canonical, folder).settings if not one.equal] == ["lr_mult"]


def rename_multipliers(about: dict[str, Any]) -> None:
    """As NeMo names them."""
    for group in about["param_groups"]:
        group |= {f"pre_{key}": group.pop(key) for key in ("wd_mult", "lr_mult")}


def leave_out_multipliers(about: dict[str, Any]) -> None:
    """As ms-swift does; a group without weight decay among others with it has the multiplier 0, also on a resume."""
    for group in about["param_groups"]:
        del group["wd_mult"], group["lr_mult"]


def add_classes(about: dict[str, Any]) -> None:
    for group in about["param_groups"]:
        group |= {"cpu_optimizer_cls": "AdamW", "foreach": True}


@pytest.mark.parametrize("change", [rename_multipliers, leave_out_multipliers, add_classes])
def test_what_a_resume_takes_for_the_same_is_equal(
    change: Callable[[dict[str, Any]], None],
    canonical: Path,
    changed: Callable[[Callable[[dict[str, Any]], None]], Path],
) -> None:
    found = mcore_ckpt_ext.compare(canonical, changed(change))
    assert found.equal, [setting for setting in found.settings if not setting.equal]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "target",
    [
        mcore_ckpt_ext.TorchDist(), mcore_ckpt_ext.TorchDist(megatron_version="0.12.0"), mcore_ckpt_ext.Legacy(),
        mcore_ckpt_ext.Legacy(tensor_model_parallel_size=1), mcore_ckpt_ext.FsdpDtensor(), mcore_ckpt_ext.Canonical(),
        mcore_ckpt_ext.TorchDist(loop="bridge"),
    ],
    ids=str,
)  # fmt: skip
def test_a_conversion_carries_all_settings(target: Any, tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "out", target)
    found = mcore_ckpt_ext.compare(fixture_named("p02").run, tmp_path / "out")
    assert [setting for setting in found.settings if not setting.equal] == []
    assert found.settings_equal is True


def test_weights_alone_have_no_settings(tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "hf", mcore_ckpt_ext.HuggingFace())
    found = mcore_ckpt_ext.compare(fixture_named("p02").run, tmp_path / "hf")
    assert found.settings_equal is None
    assert found.settings == ()
    assert found.equal
