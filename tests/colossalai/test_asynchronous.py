"""Test Booster's asynchronous saves: the files hold what the job had when it called, whatever follows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai_on_cpu import ranks
from safetensors.torch import load_file
from torch import nn

from mcore_ckpt_ext import zero_strict_state_dict as strict
from tests.colossalai import boosted
from tests.colossalai.asynchronous_writer import AsyncFileWriter
from tests.colossalai.jobs import bits, refusal
from tests.colossalai.models import VOCABULARY, Counted, gpt2
from tests.colossalai.plugins import PLUGINS, boost


def _strided(vocabulary: int = VOCABULARY) -> Any:
    """GPT-2 with a frozen parameter and a buffer that are not contiguous."""
    module = gpt2(vocabulary)
    module.turned = nn.Parameter(torch.arange(48.0).view(6, 8).t(), requires_grad=False)
    module.register_buffer("image", torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last))
    return module


def _boost(plugin: str, seed: int = 0) -> Any:
    return boost(plugin, _strided, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("plugin", ["gemini", "hybrid_parallel"])
def test_tensors_that_are_not_contiguous(tmp_path: Path, plugin: str, shard: bool) -> None:
    def job() -> None:
        booster, model, _ = _boost(plugin)
        path = tmp_path / ("model" if shard else "model.safetensors")
        if not shard and dist.get_rank() == 0:
            # The writer does not shorten what is there.
            path.write_bytes(bytes(10**6))
        booster.save_model(model, str(path), shard=shard, use_safetensors=True, use_async=True)
        booster.checkpoint_io._sync_io()
        dist.barrier()
        (file,) = path.glob("model-*.safetensors") if shard else [path]
        plain, content = _strided(), load_file(file)
        for name in ("turned", "image"):
            assert torch.equal(content[name].float(), getattr(plain, name)), name
        # A padded vocabulary, which ColossalAI's own method cannot save without tensor parallelism.
        assert len(content["transformer.wte.weight"]) == VOCABULARY

    ranks.run(2, job)


@pytest.mark.thorough
@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_save_waits_for_the_memory_of_the_former_one(tmp_path: Path, plugin: str, shard: bool) -> None:
    def job() -> None:
        booster, model, optimizer = _boost(plugin)
        boosted.train(booster, model, optimizer, range(1))
        paths = [tmp_path / (name if shard else f"{name}.safetensors") for name in ("first", "second")]
        for path in paths:
            AsyncFileWriter.is_open.clear()
            booster.save_optimizer(optimizer, str(path), shard=shard, use_async=True)
            boosted.train(booster, model, optimizer, range(1, 3))
        booster.checkpoint_io._sync_io()
        dist.barrier()
        first, second = (_moments(path) for path in paths)
        assert list(first) == list(second)
        assert any(not torch.equal(first[name], second[name]) for name in first)
        again = _boost(plugin)
        boosted.train(*again, range(1))
        AsyncFileWriter.is_open.set()
        path = tmp_path / ("alone" if shard else "alone.safetensors")
        again[0].save_optimizer(again[2], str(path), shard=shard, use_async=True)
        again[0].checkpoint_io._sync_io()
        dist.barrier()
        assert all(torch.equal(bits(first[name]), bits(value)) for name, value in _moments(path).items())

    ranks.run(2, job)


def _moments(path: Path) -> dict[str, torch.Tensor]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {name: value for file in files for name, value in load_file(file).items() if "exp_avg" in name}


@pytest.mark.thorough
@pytest.mark.parametrize("plugin", PLUGINS)
def test_another_number_of_ranks_goes_on_exactly(tmp_path: Path, plugin: str) -> None:
    places = {True: [tmp_path / "model", tmp_path / "optimizer"]}
    places[False] = [path.with_suffix(".safetensors") for path in places[True]]

    def save() -> list[float]:
        AsyncFileWriter.is_open.set()
        booster, model, optimizer = boost(plugin)
        boosted.train(booster, model, optimizer, range(2))
        for shard, (of_model, of_optimizer) in places.items():
            # LowLevelZeroPlugin's models are written by ColossalAI alone, with a method that this writer lacks.
            use_async = plugin != "low_level_zero"
            booster.save_model(model, str(of_model), shard=shard, use_safetensors=True, use_async=use_async)
            booster.save_optimizer(optimizer, str(of_optimizer), shard=shard, use_async=True)
        booster.checkpoint_io._sync_io()
        return boosted.train(booster, model, optimizer, range(2, 5))

    def load() -> list[list[float]]:
        losses = []
        for seed, (of_model, of_optimizer) in enumerate(places.values(), 1):
            booster, model, optimizer = boost(plugin, seed=seed)
            booster.load_model(model, str(of_model))
            booster.load_optimizer(optimizer, str(of_optimizer))
            losses.append(boosted.train(booster, model, optimizer, range(2, 5)))
        return losses

    # Every rank has the same data, so the mean of their gradients is that of one, exactly.
    expected = ranks.run(2, save)[0]
    for world_size in (1, 4):
        assert ranks.run(world_size, load)[0] == [expected, expected]


@pytest.mark.parametrize("dtypes", [("master", "compute"), ("compute", "master")])
def test_another_dtype_and_a_smaller_file_at_the_same_place(tmp_path: Path, dtypes: Any) -> None:
    def job() -> None:
        booster, model, _ = _boost("gemini")
        for dtype in dtypes:
            strict.install(dtype=dtype)
            for shard, path in ((False, tmp_path / "model.safetensors"), (True, tmp_path / "model")):
                booster.save_model(model, str(path), shard=shard, use_safetensors=True, use_async=True)
                booster.checkpoint_io._sync_io()
                dist.barrier()
                (file,) = path.glob("model-*.safetensors") if shard else [path]
                given = torch.float32 if dtype == "master" else torch.bfloat16
                assert load_file(file)["transformer.wpe.weight"].dtype == given
            expected = str(given).removeprefix("torch.")
            assert f'"torch_dtype": "{expected}"' in (tmp_path / "model" / "config.json").read_text()

    ranks.run(2, job)


@pytest.mark.parametrize("shard", [True, False])
def test_objects_are_refused_on_all_ranks(tmp_path: Path, shard: bool) -> None:
    def build(vocabulary: int = VOCABULARY) -> Any:
        module = gpt2(vocabulary)
        module.counted = Counted(2, 2)
        return module

    def job() -> None:
        _boost("gemini")
        booster, model, _ = boosted.boost(build)
        save = partial(booster.save_model, model, str(tmp_path / "model"), shard, use_safetensors=True, use_async=True)
        assert "cannot hold an entry that is no tensor; found: dict; where: counted._extra_state" in refusal(save)

    ranks.run(2, job)
