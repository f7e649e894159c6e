"""Test that all ranks load the same content: no model is half of one checkpoint and half of another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai_on_cpu import ranks

from mcore_ckpt_ext import zero_strict_state_dict as strict
from mcore_ckpt_ext.colossalai import state_digest
from tests.colossalai.jobs import gathered_masters, refusal, same_bits, train, wrap
from tests.colossalai.models import Everything, TinyGPT


def _state(seed: int) -> Any:
    torch.manual_seed(seed)
    return Everything().state_dict()


def test_an_empty_dict_means_that_of_rank_0() -> None:
    def job() -> None:
        model, _ = wrap(Everything, ignore=("ignored",))
        for seed, is_strict in ((5, True), (6, False)):
            state = _state(seed)
            state["counted._extra_state"] = state["again._extra_state"] = {"seen": seed}
            state["steps"] = torch.tensor([seed])
            mine = {} if dist.get_rank() else state
            assert "matched" in str(strict.zero_strict_load_state_dict(model, mine, strict=is_strict))
            masters = gathered_masters(model)
            assert same_bits(masters, {name: state[name] for name in masters})
            assert (model.module.counted.seen, model.module.steps.item()) == (seed, seed)
            assert torch.equal(model.module.ignored, state["ignored"].bfloat16())
        # What is missing or unexpected in rank 0's dict is so on all.
        state = {**_state(7), "more": torch.ones(1)}
        text = refusal(lambda: strict.zero_strict_load_state_dict(model, {} if dist.get_rank() else state))
        assert 'Unexpected key(s) in state_dict: "more"' in text
        # The other way round there is nobody to take it from.
        mine = state if dist.get_rank() else {}
        text = refusal(lambda: strict.zero_strict_load_state_dict(model, mine, strict=False))
        assert "nothing on rank 0" in text
        assert same_bits(gathered_masters(model), masters)

    ranks.run(2, job)


def test_different_contents_are_refused_on_all_ranks() -> None:
    def job() -> None:
        strict.install()
        model, optimizer = wrap()
        state = TinyGPT().state_dict()
        before = gathered_masters(model)
        one_bit = copy.deepcopy(state)
        one_bit["norm.weight"].view(torch.int32)[7] ^= 1
        shape = {**state, "norm.weight": torch.ones(7)}
        fewer = {name: value for name, value in state.items() if name != "norm.weight"}
        for other in (one_bit, shape, fewer):
            mine = other if dist.get_rank() else state
            text = refusal(lambda mine=mine: model.load_state_dict(mine, strict=False))
            assert "different contents" in text
            assert "where: norm.weight;" in text
            assert "rank 0: float32 (32,)" in text
            assert "rank 1" in text
        assert same_bits(gathered_masters(model), before)
        # The order of the keys is no content.
        model.load_state_dict(dict(reversed(state.items())) if dist.get_rank() else state)
        train(model, optimizer, range(2))
        saved = optimizer.state_dict(only_rank_0=False)
        moments = copy.deepcopy(saved)
        moments["state"][1]["exp_avg"][0, 0] += 1
        groups = copy.deepcopy(saved)
        groups["param_groups"][0]["lr"] = 0.5
        for other, where in ((moments, "state/1/exp_avg"), (groups, "param_groups/0/lr")):
            mine = other if dist.get_rank() else saved
            assert f"where: {where};" in refusal(lambda mine=mine: optimizer.load_state_dict(mine))

    ranks.run(2, job)


def test_large_tensors_are_sampled_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_digest, "_WHOLE_BYTES", 0)
    value = torch.zeros(state_digest._SAMPLES * state_digest._SAMPLE_BYTES)
    before = state_digest.digests({"a": value})
    for place in (0, len(value) - 1):
        value[place] = 1
        assert state_digest.digests({"a": value}) != before
        value[place] = 0
    assert state_digest.digests({"a": value}) == before
    assert state_digest.digests({"a": value.bfloat16()}) != before


def test_values_that_are_none_are_refused_before_anything_is_written() -> None:
    def job() -> None:
        model, _ = wrap()
        before = gathered_masters(model)
        for kind, value in (("meta", torch.empty(32, device="meta")), ("sparse", torch.ones(32).to_sparse())):
            state = {**TinyGPT().state_dict(), "norm.weight": value}
            text = refusal(lambda state=state: strict.zero_strict_load_state_dict(model, state))
            assert kind in text
            assert "norm.weight" in text
        assert same_bits(gathered_masters(model), before)

    ranks.run(1, job)


def test_two_models_on_two_halves_of_the_job() -> None:
    def job() -> None:
        strict.install()
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        half = dist.get_rank() // 2
        model, optimizer = wrap(seed=half, zero_group=halves[half], zero_size=2)
        train(model, optimizer, range(1 + half))
        # Not in step with each other: the halves save and load different things, and one of them more often.
        for _ in range(1 + half):
            state, moments = model.state_dict(), optimizer.state_dict()
            assert bool(state) == (dist.get_rank(halves[half]) == 0)
            masters = gathered_masters(model)
            model.load_state_dict(state)
            optimizer.load_state_dict(moments)
            assert same_bits(gathered_masters(model), masters)
        text = refusal(lambda: model.state_dict(prefix=str(dist.get_rank())))
        assert f"rank {2 * half}: " in text
        assert f"rank {2 * half + 1}: " in text

    ranks.run(4, job)


def test_each_rank_may_name_its_own_gpu() -> None:
    def job() -> None:
        model, _ = wrap()
        state = strict.zero_strict_state_dict(model, device=f"cuda:{dist.get_rank()}", only_rank_0=False)
        assert same_bits(state, strict.zero_strict_state_dict(model, only_rank_0=False))
        text = refusal(lambda: strict.zero_strict_state_dict(model, device=("cpu", "cuda:1")[dist.get_rank()]))
        assert "different arguments (device)" in text

    ranks.run(2, job)
