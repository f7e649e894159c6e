"""Test that a damaged checkpoint is refused by name, on all ranks, before anything has changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai_on_cpu import ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from mcore_ckpt_ext import zero_strict_state_dict as strict
from mcore_ckpt_ext.colossalai.lost_states import OURS, drop_outdated, names_without_state, stateless_note
from mcore_ckpt_ext.errors import ModelMismatchError
from tests.colossalai.asynchronous_writer import AsyncFileWriter
from tests.colossalai.boosted import train
from tests.colossalai.jobs import bits, gathered_masters, refusal
from tests.colossalai.models import gpt2
from tests.colossalai.plugins import PLUGINS, boost


def _second(folder: Path) -> Path:
    return sorted(folder.glob("*-00002.*"))[0]


def _index(folder: Path) -> Path:
    return next(folder.glob("*.index.json"))


def _change_index(folder: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(_index(folder).read_text())
    change(content)
    _index(folder).write_text(json.dumps(content))


def _list_another_key(folder: Path) -> None:
    _change_index(folder, lambda index: index["weight_map"].update({"999": _second(folder).name}))


def _forget_a_shard(folder: Path) -> None:
    name = _second(folder).name
    _second(folder).unlink()

    def change(index: Any) -> None:
        index["weight_map"] = {key: file for key, file in index["weight_map"].items() if file != name}

    _change_index(folder, change)


def _halve_a_moment(folder: Path) -> None:
    file = _second(folder)
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        flat = load_file(file)
        name = next(name for name in flat if name.endswith("exp_avg") and flat[name].dim() == 2)
        save_file(flat | {name: flat[name][::2].contiguous()}, file, metadata)
    else:
        states = torch.load(file)
        state = next(state for state in states.values() if state["exp_avg"].dim() == 2)
        state["exp_avg"] = state["exp_avg"][::2].clone()
        torch.save(states, file)


BOTH: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda folder: _second(folder).write_bytes(_second(folder).read_bytes()[:-200]), "-00002"),
    "empty": (lambda folder: _second(folder).write_bytes(b""), "-00002"),
    "missing": (lambda folder: _second(folder).unlink(), "-00002"),
    "unknown key": (_list_another_key, "no 999"),
    "half an index": (lambda folder: _index(folder).write_text(_index(folder).read_text()[:-9]), ".index.json"),
    "no index": (lambda folder: _index(folder).write_text("[]"), ".index.json"),
}
OPTIMIZER: dict[str, tuple[Callable[[Path], object], str]] = {
    "forgotten shard": (_forget_a_shard, "has lost states of the optimizer"),
    "another shape": (_halve_a_moment, "another shape than its parameter"),
    "no groups": (lambda folder: next(folder.glob("*_group.bin")).unlink(), "_group.bin"),
    "fewer groups": (lambda folder: torch.save([], next(folder.glob("*_group.bin"))), "expected: "),
    "groups not named": (lambda folder: _change_index(folder, lambda index: index["metadata"].clear()), ".index.json"),
}


def _live(model: Any, optimizer: Any) -> list[bytes]:
    is_gemini = hasattr(model, "chunk_manager")
    tensors = [*(gathered_masters(model).values() if is_gemini else model.unwrap().parameters())]
    for group in optimizer.optim.param_groups:
        for parameter in group["params"]:
            tensors += [] if is_gemini else [parameter]
            tensors += optimizer.optim.state.get(parameter, {}).values()
    return [bits(torch.as_tensor(tensor).data).numpy().tobytes() for tensor in tensors]


@pytest.mark.thorough
@pytest.mark.parametrize("use_async", [False, True], ids=["bin", "asynchronous safetensors"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_sharded_files(tmp_path: Path, plugin: str, use_async: bool) -> None:
    def job() -> None:
        AsyncFileWriter.is_open.set()
        booster, model, optimizer = boost(plugin)
        train(booster, model, optimizer, range(1))
        booster.save_model(model, str(tmp_path / "model"), shard=True, size_per_shard=0.02)
        save = {"shard": True, "size_per_shard": 0.05, "use_async": use_async}
        booster.save_optimizer(optimizer, str(tmp_path / "optimizer"), **save)
        booster.checkpoint_io._sync_io()
        train(booster, model, optimizer, range(1, 2))
        before = _live(model, optimizer)
        loads: dict[str, Callable[[str], object]] = {
            "model": lambda path: booster.load_model(model, path),
            "optimizer": lambda path: booster.load_optimizer(optimizer, path),
        }
        cases = [("optimizer", *case) for case in (BOTH | OPTIMIZER).items()]
        cases += [("model", *case) for case in BOTH.items() if not use_async]
        for number, (part, name, (damage, expected)) in enumerate(cases):
            damaged = tmp_path / str(number)
            if dist.get_rank() == 0:
                shutil.copytree(tmp_path / part, damaged)
                damage(damaged)
            dist.barrier()
            text = refusal(lambda part=part, damaged=damaged: loads[part](str(damaged)))
            assert expected in text, (part, name, text)
            assert _live(model, optimizer) == before, (part, name)
        for part, load in loads.items():
            load(str(tmp_path / part))

    ranks.run(2, job, timeout=200)


def _with_unused(plugin: str) -> Any:
    """GPT-2 with a frozen parameter, and one that never receives a gradient, which Gemini does not train."""
    module = gpt2()
    module.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
    module.unused = nn.Parameter(torch.ones(6), requires_grad=plugin != "gemini")
    return module


@pytest.mark.thorough
@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_parameters_without_state_are_no_loss(
    tmp_path: Path, plugin: str, shard: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def job() -> None:
        AsyncFileWriter.is_open.set()
        for number, use_async in enumerate((False, True)):
            booster, model, optimizer = boost(plugin, partial(_with_unused, plugin))
            path = str(tmp_path / f"{number}{'' if shard else '.safetensors' if use_async else '.bin'}")
            for _ in range(2):  # before the first step, and after it
                booster.save_optimizer(optimizer, path, shard=shard, use_async=use_async)
                booster.checkpoint_io._sync_io()
                dist.barrier()
                again = boost(plugin, partial(_with_unused, plugin), seed=1)
                again[0].load_optimizer(again[2], path)
                train(booster, model, optimizer, range(1))
        assert not [record for record in caplog.records if record.name == "mcore_ckpt_ext"]

    ranks.run(2, job)


@pytest.mark.thorough
@pytest.mark.parametrize("plugin", PLUGINS)
def test_states_that_stock_did_not_save_are_named_once(
    tmp_path: Path, plugin: str, caplog: pytest.LogCaptureFixture
) -> None:
    def job() -> int:
        booster, model, optimizer = boost(plugin)
        strict.uninstall()
        train(booster, model, optimizer, range(1))
        booster.save_optimizer(optimizer, str(tmp_path), shard=True, size_per_shard=0.05)
        dist.barrier()
        if dist.get_rank() == 0:
            _forget_a_shard(tmp_path)
        dist.barrier()
        booster, model, optimizer = boost(plugin)
        booster.load_optimizer(optimizer, str(tmp_path))
        return sum("no optimizer state of" in record.getMessage() for record in caplog.records)

    assert ranks.run(2, job) == [1, 0]


def _masters(model: Any, optimizer: Any) -> list[torch.Tensor]:
    if hasattr(model, "chunk_manager"):
        return list(gathered_masters(model).values())
    return [master for group in optimizer.optim.param_groups for master in group["params"]]


@pytest.mark.thorough
@pytest.mark.parametrize("plugin", PLUGINS)
def test_what_stock_saved_again_after_more_steps_is_not_taken_for_current(
    tmp_path: Path, plugin: str, caplog: pytest.LogCaptureFixture
) -> None:
    even = partial(gpt2, 128)  # stock cannot save a padded vocabulary with HybridParallelPlugin

    def save(booster: Any, model: Any, optimizer: Any) -> None:
        booster.save_model(model, str(tmp_path / "model"), shard=True)
        booster.save_optimizer(optimizer, str(tmp_path / "optimizer"), shard=True, size_per_shard=0.05)
        dist.barrier()

    def load(booster: Any, model: Any, optimizer: Any) -> None:
        booster.load_model(model, str(tmp_path / "model"), strict=False)
        booster.load_optimizer(optimizer, str(tmp_path / "optimizer"))

    def job() -> int:
        first = boost(plugin, even)
        strict.install(dtype="compute")
        train(*first, range(1))
        save(*first)
        stock = boost(plugin, even, seed=1, is_stock=True)
        load(*stock)
        train(*stock, range(1, 3))
        save(*stock)
        if dist.get_rank() == 0:
            # As if some had been frozen since: they have no state, but the note says that they had one.
            _forget_a_shard(tmp_path / "optimizer")
        dist.barrier()
        again = boost(plugin, even, seed=2)
        strict.install(dtype="compute")
        load(*again)
        for current, of_stock in zip(_masters(*again[1:]), _masters(*stock[1:]), strict=True):
            assert torch.equal(current, of_stock.bfloat16().float())
        return sum("no optimizer state of" in record.getMessage() for record in caplog.records)

    assert ranks.run(2, job) == [1, 0]


def test_lost_states_that_were_the_newest_are_refused() -> None:
    """They leave an older step than the note's, which stock's training never does."""
    groups = [{"params": [0, 1], OURS: stateless_note([0, 1], [0, 1], 3.0)}]
    left = {"param_groups": groups, "state": {0: {"step": torch.tensor(2.0)}}}
    assert drop_outdated(left) is left
    with pytest.raises(ModelMismatchError, match="has lost states"):
        names_without_state(groups, left["state"], {0: "first", 1: "second"})


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_pickle_in_an_asynchronous_file_is_not_executed(tmp_path: Path, plugin: str) -> None:
    def job() -> None:
        AsyncFileWriter.is_open.set()
        booster, model, optimizer = boost(plugin)
        train(booster, model, optimizer, range(1))
        path = tmp_path / "optimizer.safetensors"
        booster.save_optimizer(optimizer, str(path), use_async=True)
        booster.checkpoint_io._sync_io()
        code = f"cbuiltins\nopen\n(V{tmp_path / 'executed'}\nVw\ntR.".encode()
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata()
        flat = load_file(path) | {"param_groups": torch.frombuffer(bytearray(code), dtype=torch.uint8)}
        save_file(flat, path, metadata)
        text = refusal(lambda: booster.load_optimizer(optimizer, str(path)))
        assert "optimizer.safetensors" in text
        assert "builtins.open" in text
        assert not (tmp_path / "executed").exists()

    ranks.run(1, job)
