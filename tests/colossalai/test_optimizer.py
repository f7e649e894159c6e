"""Test the parts of GeminiOptimizer's state that ColossalAI cannot save, or omits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai_on_cpu import ranks

from mcore_ckpt_ext import zero_strict_state_dict as strict
from tests.colossalai.jobs import gathered_masters, refusal, same_bits, train, wrap
from tests.colossalai.models import Everything, TinyGPT


def test_the_state_is_what_colossalai_would_give() -> None:
    def job() -> None:
        model, optimizer = wrap(with_shapes=True)
        train(model, optimizer, range(3))
        own = optimizer.state_dict(only_rank_0=False)
        strict.install()
        ours = optimizer.state_dict(only_rank_0=False)
        assert list(ours["state"]) == list(own["state"])
        assert all(same_bits(ours["state"][key], own["state"][key]) for key in own["state"])
        groups = [
            {name: value for name, value in group.items() if name != "mcore_ckpt_ext"} for group in ours["param_groups"]
        ]
        assert groups == own["param_groups"]
        assert bool(optimizer.state_dict()["state"]) == (dist.get_rank() == 0)

    for world_size in (1, 2):
        ranks.run(world_size, job)


def test_each_rank_can_load_its_own_state_dict() -> None:
    def job() -> None:
        strict.install()
        model, optimizer = wrap()
        train(model, optimizer, range(3))
        saved = optimizer.state_dict()
        assert bool(saved["state"]) == (dist.get_rank() == 0)
        before = optimizer.state_dict(only_rank_0=False)
        masters, uninterrupted = model.state_dict(only_rank_0=False), train(model, optimizer, range(3, 6))
        model.load_state_dict(masters)
        # Not only the rank's own moments, kept: those that rank 0 was handed.
        optimizer.load_state_dict(saved)
        after = optimizer.state_dict(only_rank_0=False)
        assert all(same_bits(after["state"][key], before["state"][key]) for key in before["state"])
        assert train(model, optimizer, range(3, 6)) == uninterrupted

    for world_size in (1, 2):
        ranks.run(world_size, job)


def test_frozen_parameters_and_no_shapes() -> None:
    def job() -> None:
        model, optimizer = wrap(Everything, ignore=("ignored",), with_shapes=True)
        train(model, optimizer, range(2))
        # The negative controls.
        assert refusal(lambda: optimizer.state_dict()).startswith("KeyError")
        optimizer.params_info = None
        assert refusal(lambda: optimizer.state_dict()).startswith(("TypeError", "KeyError"))
        strict.install()
        saved = optimizer.state_dict(only_rank_0=False)
        frozen = [key for key, parameter in optimizer.id_to_real_params.items() if not parameter.requires_grad]
        assert frozen
        assert not set(frozen) & set(saved["state"])
        again_model, again = wrap(Everything, ignore=("ignored",), seed=1)
        again_model.load_state_dict(model.state_dict(only_rank_0=False))
        again.load_state_dict(saved)
        assert train(again_model, again, range(2, 5)) == train(model, optimizer, range(2, 5))

    ranks.run(2, job)


def test_the_loss_scale_is_kept() -> None:
    def job(patched: bool) -> tuple[float, int]:
        model, optimizer = wrap(dtype=torch.float16, with_shapes=True)
        if patched:
            strict.install()
        train(model, optimizer, range(3))
        scaler = optimizer.mix_precision_mixin.grad_scaler
        scaler._scale.fill_(32.0)
        saved = optimizer.state_dict(only_rank_0=False)
        again = wrap(dtype=torch.float16, with_shapes=True)[1]
        again.load_state_dict(saved)
        scaler = again.mix_precision_mixin.grad_scaler
        # What is put beside the groups does not stay in them.
        assert all("mcore_ckpt_ext" not in group for group in again.optim.param_groups)
        return scaler.scale.item(), scaler._growth_step

    assert ranks.run(2, job, True) == [(32.0, 3)] * 2
    assert ranks.run(2, job, False) == [(128.0, 0)] * 2


def test_asynchronous_saves_of_any_step_fit_one_buffer() -> None:
    def job() -> None:
        from colossalai.utils.safetensors import _flatten_optim_state_dict

        strict.install()
        model, optimizer = wrap(dtype=torch.float16)
        train(model, optimizer, range(1))
        sizes = []
        for step in (1, 255, 256, 65536):
            optimizer.mix_precision_mixin.grad_scaler._growth_step = step
            flat, _ = _flatten_optim_state_dict(optimizer.state_dict(only_rank_0=False))
            sizes.append({name: value.shape for name, value in flat.items()})
        assert sizes[1:] == sizes[:-1]

    ranks.run(1, job)


def test_parameters_in_another_order_are_found_by_name() -> None:
    def job() -> None:
        from colossalai.nn.optimizer import HybridAdam
        from colossalai.zero import GeminiOptimizer

        strict.install()
        model, optimizer = wrap()
        train(model, optimizer, range(3))
        saved, state = optimizer.state_dict(only_rank_0=False), model.state_dict(only_rank_0=False)
        again_model, _ = wrap(seed=1)
        backwards = list(again_model.parameters())[::-1]
        again = GeminiOptimizer(HybridAdam(backwards, lr=1e-2), again_model)
        again_model.load_state_dict(state)
        again.load_state_dict(saved)
        assert train(again_model, again, range(3, 6)) == train(model, optimizer, range(3, 6))

    ranks.run(2, job)


def test_a_dict_that_does_not_fit_is_refused_by_all_and_nothing_is_written() -> None:
    def spoilt(saved: Any, how: str) -> Any:
        saved = copy.deepcopy(saved)
        if how == "shape":
            saved["state"][2]["exp_avg"] = torch.zeros(3, 3)
        elif how == "names":
            saved["param_groups"][0]["mcore_ckpt_ext"]["names"][1] = "other.weight"
        elif how == "count":
            saved["param_groups"][0]["params"].pop()
        return saved

    def job() -> None:
        strict.install()
        model, optimizer = wrap()
        train(model, optimizer, range(3))
        saved = optimizer.state_dict(only_rank_0=False)
        train(model, optimizer, range(3, 4))
        before, masters = optimizer.state_dict(only_rank_0=False), gathered_masters(model)
        expected = {"shape": "layers.1.weight", "names": "other.weight", "count": "other parameters"}
        for how, text in expected.items():
            bad = spoilt(saved, how)
            assert text in refusal(lambda bad=bad: optimizer.load_state_dict(bad))
            # Only rank 1 has the bad file; rank 0 must not wait for it, nor go on.
            mine = bad if dist.get_rank() else saved
            refused = refusal(lambda mine=mine: optimizer.load_state_dict(mine))
            assert "different contents" in refused, refused
            assert "rank 1" in refused
        after = optimizer.state_dict(only_rank_0=False)
        assert all(same_bits(after["state"][key], before["state"][key]) for key in before["state"])
        assert same_bits(gathered_masters(model), masters)

    ranks.run(2, job)


def test_masters_without_a_copy_in_fp32() -> None:
    def job() -> None:
        strict.install(dtype="compute")
        model, optimizer = wrap(TinyGPT, master_weights=False)
        train(model, optimizer, range(3))
        saved = model.state_dict(only_rank_0=False), optimizer.state_dict(only_rank_0=False)
        again_model, again = wrap(TinyGPT, master_weights=False, seed=1)
        again_model.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        assert same_bits(again_model.state_dict(only_rank_0=False), saved[0])
        # The moments are in the dtype that they are trained in, which fp32 holds exactly.
        assert train(again_model, again, range(3, 8)) == train(model, optimizer, range(3, 8))
        assert "no fp32 masters" in refusal(lambda: model.state_dict(dtype="master"))

    ranks.run(2, job)


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_masters_the_plain_installation_gives_what_is_trained(world_size: int) -> None:
    def job() -> None:
        strict.install()
        model, optimizer = wrap(TinyGPT, master_weights=False)
        train(model, optimizer, range(3))
        own = model.state_dict(only_rank_0=False, strict=False)
        state = model.state_dict(only_rank_0=False)
        assert {value.dtype for value in state.values()} == {torch.bfloat16}
        assert same_bits({name: state[name] for name in own}, own)
        shards = [shard for shard, _ in model.state_dict_shard(only_rank_0=False)]
        gathered = {name: value for shard in shards for name, value in shard.items()}
        assert same_bits({name: gathered[name] for name in state}, state)
        assert same_bits(strict.get_static_torch_model(model, only_rank_0=False).state_dict(), state)

    ranks.run(world_size, job)
