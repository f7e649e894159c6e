"""Test a save, a new wrapper and a load: the losses are those of the uninterrupted run, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from colossalai_on_cpu import ranks

from mcore_ckpt_ext import zero_strict_state_dict as strict
from tests.colossalai.jobs import PLACEMENTS, batch, gathered_masters, same_bits, train, wrap
from tests.colossalai.models import TinyGPT

BEFORE, MORE = range(2), range(2, 5)


def _saved(placement: dict[str, Any], dtype: torch.dtype, goes_back: bool = False) -> Any:
    """A run of five steps, and what it saved after two; it can go back there itself."""
    strict.install()
    model, optimizer = wrap(dtype=dtype, **placement)
    train(model, optimizer, BEFORE, same_data=True)
    masters = gathered_masters(model)
    state = model.state_dict(only_rank_0=False), optimizer.state_dict(only_rank_0=False)
    assert same_bits({name: state[0][name] for name in masters}, masters)
    uninterrupted = train(model, optimizer, MORE, same_data=True)
    if goes_back:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        assert train(model, optimizer, MORE, same_data=True) == uninterrupted
    return *state, uninterrupted


def _resumed(saved: Any, placement: dict[str, Any], dtype: torch.dtype) -> list[float]:
    strict.install()
    model, optimizer = wrap(dtype=dtype, seed=1, **placement)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert same_bits(model.state_dict(only_rank_0=False), saved[0])
    again = optimizer.state_dict(only_rank_0=False)
    assert again["param_groups"] == saved[1]["param_groups"]
    assert list(again["state"]) == list(saved[1]["state"])
    assert all(same_bits(again["state"][key], saved[1]["state"][key]) for key in again["state"])
    return train(model, optimizer, MORE, same_data=True)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)], ids=["bf16", "fp16"]
)
def test_every_placement_resumes_itself_and_the_next(dtype: torch.dtype) -> None:
    def job() -> None:
        placements = list(PLACEMENTS)
        for here, there in itertools.pairwise([*placements, placements[0]]):
            saved = _saved(PLACEMENTS[here], dtype, goes_back=dtype == torch.bfloat16)
            assert _resumed(saved, PLACEMENTS[there], dtype) == saved[2], f"{here} to {there}"

    ranks.run(2, job)


def test_chunks_that_inference_left_gathered() -> None:
    def job() -> None:
        strict.install()
        model, optimizer = wrap(scatter_after_inference=False)
        train(model, optimizer, range(1))
        state = model.state_dict(only_rank_0=False)
        tokens = batch(9)
        with torch.no_grad():
            before = model(tokens)
            assert any(chunk.is_gathered for chunk in model.chunk_manager.get_chunks(model.fp16_params))
            assert same_bits(model.state_dict(only_rank_0=False), state)
            model.load_state_dict({name: value * 2 for name, value in state.items()})
            assert not torch.equal(model(tokens), before)
            model.load_state_dict(state)
            assert torch.equal(model(tokens), before)

    ranks.run(2, job)


def test_another_number_of_ranks_and_another_chunk_size() -> None:
    # Every rank has the same data, so the mean of their gradients is that of one, exactly.
    saved, _ = ranks.run(2, _saved, {}, torch.bfloat16)
    for world_size in (1, 4):
        losses = ranks.run(world_size, _resumed, saved, {"chunk_size": 5120}, torch.bfloat16)
        assert losses == [saved[2]] * world_size


def test_colossalais_own_files_do_not_resume_exactly() -> None:
    def job() -> bool:
        model, optimizer = wrap(with_shapes=True)
        train(model, optimizer, BEFORE)
        state, moments = model.state_dict(only_rank_0=False), optimizer.state_dict(only_rank_0=False)
        uninterrupted = train(model, optimizer, MORE)
        model, optimizer = wrap(seed=1, with_shapes=True)
        model.load_state_dict(state, strict=False)
        optimizer.load_state_dict(moments)
        return train(model, optimizer, MORE) == uninterrupted

    assert ranks.run(2, job) == [False, False]


def test_rounded_model_files_leave_the_masters_to_the_optimizers() -> None:
    def job() -> None:
        strict.install(dtype="compute")
        model, optimizer = wrap()
        fresh = {name: value + 2**-12 for name, value in TinyGPT().state_dict().items()}
        model.load_state_dict(fresh)
        # Also before the first step, when there are masters but no moments.
        again = wrap(seed=1)[1]
        again.load_state_dict(optimizer.state_dict(only_rank_0=False))
        masters = gathered_masters(again.module)
        assert same_bits(masters, {name: fresh[name] for name in masters})
        train(model, optimizer, BEFORE)
        state, moments = model.state_dict(only_rank_0=False), optimizer.state_dict(only_rank_0=False)
        assert {value.dtype for value in state.values()} == {torch.bfloat16}
        uninterrupted = train(model, optimizer, MORE)
        for optimizer_first in (False, True):
            model, optimizer = wrap(seed=1)
            loads = [(model, state), (optimizer, moments)]
            for part, saved in reversed(loads) if optimizer_first else loads:
                part.load_state_dict(saved)
            assert train(model, optimizer, MORE) == uninterrupted
        # Masters that training has changed since are no longer those of the file.
        model.load_state_dict(state)
        assert same_bits(
            gathered_masters(model), {name: state[name].float() for name in gathered_masters(model)}
        )  # fmt: skip

    ranks.run(2, job)
