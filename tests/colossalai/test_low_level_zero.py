"""Test LowLevelZeroPlugin: the optimizer's files have masters and loss scale, and stock loads them, too."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai_on_cpu import ranks

from mcore_ckpt_ext import zero_strict_state_dict as strict
from mcore_ckpt_ext.colossalai.hybrid_cuts import part
from tests.colossalai.boosted import train
from tests.colossalai.jobs import bits, refusal
from tests.colossalai.models import gpt2

BEFORE, MORE = range(2), range(2, 5)


def _boost(stage: int, precision: str = "bf16", seed: int = 0, make_optimizer: Any = None) -> tuple[Any, Any, Any]:
    from colossalai.booster import Booster
    from colossalai.booster.plugin import LowLevelZeroPlugin
    from colossalai.nn.optimizer import HybridAdam

    torch.manual_seed(seed)
    module = gpt2()
    plugin = LowLevelZeroPlugin(stage=stage, precision=precision, initial_scale=128)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(module, (make_optimizer or partial(HybridAdam, lr=1e-2))(module.parameters()))
    return booster, model, optimizer


def _save(folder: Path, shard: bool, booster: Any, model: Any, optimizer: Any) -> None:
    folder.mkdir(exist_ok=True)
    booster.save_model(model, str(folder / "model.bin"))
    booster.save_optimizer(optimizer, str(folder / ("optimizer" if shard else "optimizer.bin")), shard=shard)
    dist.barrier()


def _load(folder: Path, shard: bool, booster: Any, model: Any, optimizer: Any, optimizer_first: bool = False) -> None:
    loads = [
        lambda: booster.load_model(model, str(folder / "model.bin")),
        lambda: booster.load_optimizer(optimizer, str(folder / ("optimizer" if shard else "optimizer.bin"))),
    ]
    for load in reversed(loads) if optimizer_first else loads:
        load()


def _state(optimizer: Any) -> dict[str, bytes]:
    states = optimizer.state_dict()["state"]
    return {
        f"{key}.{name}": bytes(bits(torch.as_tensor(value)).tolist())
        for key, state in sorted(states.items())
        for name, value in state.items()
    }


def _began(folder: Path, stage: int, precision: str, shard: bool) -> tuple[dict[str, bytes], list[float]]:
    """A run of five steps that saves after two: its state then, and its later losses."""
    strict.install(plugins=("low_level_zero",))
    booster, model, optimizer = _boost(stage, precision)
    train(booster, model, optimizer, BEFORE)
    if precision == "fp16":
        optimizer.mixed_precision_mixin.grad_scaler._scale.fill_(32.0)
    _save(folder, shard, booster, model, optimizer)
    # What stands beside the state while it is saved does not stay.
    assert all("fp32_param" not in state for state in optimizer.optim.state.values())
    assert "mcore_ckpt_ext" not in optimizer.optim.param_groups[0]
    return _state(optimizer), train(booster, model, optimizer, MORE)


def _went_on(
    folder: Path, stage: int, precision: str, shard: bool, optimizer_first: bool
) -> tuple[dict[str, bytes], list[float]]:
    strict.install(plugins="low_level_zero")
    booster, model, optimizer = _boost(stage, precision, seed=1)
    _load(folder, shard, booster, model, optimizer, optimizer_first)
    if precision == "fp16":
        assert optimizer.mixed_precision_mixin.grad_scaler.scale.item() == 32.0
    return _state(optimizer), train(booster, model, optimizer, MORE)


def test_resumes_exactly_where_stock_does_not(tmp_path: Path) -> None:
    def job() -> None:
        for number, (stage, precision, shard) in enumerate(((1, "bf16", True), (2, "bf16", False), (1, "fp16", False))):
            folder = tmp_path / str(number)
            state, losses = _began(folder, stage, precision, shard)
            for optimizer_first in (False, True):
                assert _went_on(folder, stage, precision, shard, optimizer_first) == (state, losses), (number, stage)
            strict.uninstall()
            # The negative control, which shows as well that stock loads the file.
            booster, model, optimizer = _boost(stage, precision, seed=1)
            _load(folder, shard, booster, model, optimizer)
            assert train(booster, model, optimizer, MORE) != losses

    ranks.run(2, job, timeout=300)


def test_another_stage_and_number_of_ranks(tmp_path: Path) -> None:
    # Every rank has the same data, so the mean of their gradients is that of one, exactly.
    began = ranks.run(2, _began, tmp_path, 1, "bf16", True)[0]
    assert ranks.run(1, _went_on, tmp_path, 2, "bf16", True, False) == [began]


def test_before_the_first_step(tmp_path: Path) -> None:
    def job() -> None:
        strict.install(plugins=("gemini", "low_level_zero"))
        booster, model, optimizer = _boost(1)
        _save(tmp_path, True, booster, model, optimizer)
        masters = [master.clone() for master in optimizer.optim.param_groups[0]["params"]]
        again = _boost(1, seed=1)
        _load(tmp_path, True, *again)
        assert not again[2].optim.state
        loaded = again[2].optim.param_groups[0]["params"]
        assert all(torch.equal(a, b) for a, b in zip(loaded, masters, strict=True))

    ranks.run(2, job)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_masters_that_were_trained_since_are_not_those_of_the_file(tmp_path: Path, optimizer_class: Any) -> None:
    def job() -> None:
        strict.install(plugins=("low_level_zero",))
        # The steps are too small to show in the rounded weights; SGD does not count them.
        booster, model, optimizer = _boost(1, make_optimizer=partial(optimizer_class, lr=1e-6))
        train(booster, model, optimizer, BEFORE)
        _save(tmp_path, True, booster, model, optimizer)
        _load(tmp_path, True, booster, model, optimizer, optimizer_first=True)
        (master, *_) = optimizer.optim.param_groups[0]["params"]
        loaded = master.clone()
        train(booster, model, optimizer, MORE)
        assert not torch.equal(master, loaded)
        booster.load_model(model, str(tmp_path / "model.bin"))
        assert torch.equal(master, loaded.bfloat16().float())

    ranks.run(2, job)


@pytest.mark.nightly
def test_optimizers_with_states_of_other_shapes(tmp_path: Path) -> None:
    kinds = (torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adagrad)

    def save() -> list[Any]:
        from colossalai.nn.optimizer import CAME, Adafactor

        strict.install(plugins="low_level_zero")
        later = []
        for kind in kinds:
            booster, model, optimizer = _boost(1, make_optimizer=partial(kind, lr=1e-2))
            train(booster, model, optimizer, BEFORE)
            for shard in (True, False):
                _save(tmp_path / kind.__name__, shard, booster, model, optimizer)
            later.append((_state(optimizer), train(booster, model, optimizer, MORE)))
        for factored in (partial(CAME, lr=1e-3), Adafactor):
            booster, model, optimizer = _boost(1, make_optimizer=factored)
            train(booster, model, optimizer, BEFORE)
            text = refusal(partial(_save, tmp_path / "refused", True, booster, model, optimizer))
            assert "exp_avg_sq_row of parameter 0" in text, text
        return later

    def load() -> list[Any]:
        strict.install(plugins="low_level_zero")
        later = []
        for number, kind in enumerate(kinds):
            booster, model, optimizer = _boost(2, seed=1, make_optimizer=partial(kind, lr=1e-2))
            _load(tmp_path / kind.__name__, number % 2 == 0, booster, model, optimizer)
            later.append((_state(optimizer), train(booster, model, optimizer, MORE)))
        return later

    saved = ranks.run(2, save)[0]
    for world_size in (2, 1):
        assert ranks.run(world_size, load)[0] == saved


@pytest.mark.parametrize("shard", [True, False])
def test_ranks_that_read_different_files(tmp_path: Path, shard: bool) -> None:
    def job() -> None:
        strict.install(plugins="low_level_zero")
        booster, model, optimizer = _boost(1)
        for number in range(2):  # a rank's local folder each, one of them stale
            train(booster, model, optimizer, range(1))
            _save(tmp_path / str(number), shard, booster, model, optimizer)
        before = _state(optimizer)
        own = tmp_path / str(dist.get_rank()) / ("optimizer" if shard else "optimizer.bin")
        text = refusal(lambda: booster.load_optimizer(optimizer, str(own)))
        assert "the ranks pass different contents; the optimizer is unchanged" in text, text
        assert "state/0/" in text, text
        assert _state(optimizer) == before

    ranks.run(2, job)


@pytest.mark.parametrize("shard", [True, False])
def test_a_scheduler_goes_on_after_loading(tmp_path: Path, shard: bool) -> None:
    def job() -> None:
        from colossalai.nn.optimizer import Lamb

        strict.install(plugins=("low_level_zero",))
        schedulers: list[Any] = []

        def lamb(parameters: Any) -> Any:
            # ColossalAI trains with another optimizer, which it makes of this one.
            optimizer = Lamb(parameters, lr=1e-2)
            schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5))
            return optimizer

        booster, model, optimizer = _boost(1, make_optimizer=lamb)
        train(booster, model, optimizer, BEFORE)
        schedulers[0].step()
        _save(tmp_path, shard, booster, model, optimizer)
        booster, model, optimizer = _boost(1, seed=1, make_optimizer=lamb)
        _load(tmp_path, shard, booster, model, optimizer)
        assert optimizer.optim.param_groups[0]["lr"] == 5e-3
        schedulers[1].step()
        assert optimizer.optim.param_groups[0]["lr"] == 2.5e-3

    ranks.run(1, job)


def _note_whether_masters_round_to_weights(optimizer: Any, noted: list[bool], *_: object) -> None:
    working = optimizer.get_master_to_working_map()
    masters = optimizer.optim.param_groups[0]["params"]
    own = (part(working[id(master)].detach(), dist.get_world_size(), dist.get_rank()) for master in masters)
    noted.append(all(torch.equal(master.to(weight.dtype), weight) for master, weight in zip(masters, own, strict=True)))


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_masters_of_a_former_step_that_stock_saved_again_are_not_taken(
    tmp_path: Path, optimizer_class: Any, optimizer_first: bool
) -> None:
    def job() -> None:
        boost = partial(_boost, 1, make_optimizer=partial(optimizer_class, lr=1e-2))
        strict.install(plugins="low_level_zero")
        booster, model, optimizer = boost()
        train(booster, model, optimizer, BEFORE)
        _save(tmp_path, False, booster, model, optimizer)
        strict.uninstall()
        stock = boost(seed=1)
        _load(tmp_path, False, *stock)
        train(*stock, MORE)
        _save(tmp_path, False, *stock)
        losses = []
        for plugins in ((), "low_level_zero"):
            strict.install(plugins=plugins) if plugins else strict.uninstall()
            again = boost(seed=2)
            _load(tmp_path, False, *again, optimizer_first=optimizer_first and bool(plugins))
            before_steps: list[bool] = []
            again[2].optim.register_step_pre_hook(
                partial(_note_whether_masters_round_to_weights, again[2], before_steps)
            )
            losses.append(train(*again, MORE))
            assert before_steps[0]
        assert losses[0] == losses[1]

    ranks.run(2, job)
