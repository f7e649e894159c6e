"""Test that an error on one rank is reported on all, and that no rank is left waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai_on_cpu import ranks

from mcore_ckpt_ext import zero_strict_state_dict as strict
from tests.colossalai.jobs import refusal, same_bits, wrap
from tests.colossalai.models import TinyGPT

CALLS: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda model: strict.zero_strict_state_dict(model),
    "static model": lambda model: strict.get_static_torch_model(model),
    "shards": lambda model: list(strict.iter_zero_strict_state_dict(model, 1 << 20)),
}


@pytest.mark.parametrize("call", CALLS)
def test_nan_in_a_master(call: str) -> None:
    def job() -> str:
        model, _ = wrap()
        if dist.get_rank() == 1:
            chunk = model.chunk_manager.get_chunk(model.fp32_params[2])
            info = chunk.tensors_info[model.fp32_params[2]]
            chunk.payload[info.end - chunk.shard_begin - 1] = float("nan")
        return refusal(lambda: CALLS[call](model))

    for text in ranks.run(2, job):
        assert "rank 1" in text
        assert "layers.1.weight" in text
        assert "1 NaN" in text
        assert "1023" in text


def test_infinities_are_values() -> None:
    def job() -> None:
        model, _ = wrap()
        if dist.get_rank() == 0:
            model.chunk_manager.get_chunk(model.fp32_params[0]).payload[:2] = torch.tensor([torch.inf, -torch.inf])
        state = strict.zero_strict_state_dict(model, only_rank_0=False)
        assert state["wte.weight"].view(-1)[:2].tolist() == [torch.inf, -torch.inf]

    ranks.run(2, job)


@pytest.mark.parametrize("call", ["state_dict", "static model"])
def test_a_hook_that_reads_what_zero_has_freed(call: str) -> None:
    def job() -> str:
        model, _ = wrap()
        held = model.module.norm.bias
        if call == "state_dict":
            model.module._register_state_dict_hook(lambda module, state, *_: state.update(more=held + 1))
        else:
            model.module.lazy = _CopiesByReading(held)
        return refusal(lambda: CALLS[call](model))

    for text in ranks.run(2, job):
        assert "rank 0" in text
        assert "norm.bias" in text
        assert "freed" in text


class _CopiesByReading:
    def __init__(self, held: torch.Tensor) -> None:
        self._held = held

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self._held + 1


def test_hooks_that_use_what_they_are_given_work() -> None:
    def job() -> None:
        model, _ = wrap()
        plain = TinyGPT()
        for module in (plain, model.module):
            module.register_state_dict_post_hook(_renames)
            module.register_load_state_dict_pre_hook(_renames_back)
        plain.load_state_dict(strict.zero_strict_state_dict(model, only_rank_0=False))
        expected = plain.state_dict()
        assert "twice" in expected
        assert same_bits(strict.zero_strict_state_dict(model, only_rank_0=False), expected)
        strict.zero_strict_load_state_dict(model, expected)

    ranks.run(2, job)


def _renames(module: Any, state: Any, prefix: str, _: Any) -> None:
    state[f"{prefix}norm.scale"] = state.pop(f"{prefix}norm.weight")
    state[f"{prefix}twice"] = module.norm.bias.detach() * 2


def _renames_back(module: Any, state: Any, prefix: str, *_: Any) -> None:
    state.pop(f"{prefix}twice", None)
    if f"{prefix}norm.scale" in state:
        state[f"{prefix}norm.weight"] = state.pop(f"{prefix}norm.scale")


def test_in_shards_a_hook_may_rename_but_not_compute() -> None:
    def job() -> None:
        model, _ = wrap()
        renamed = model.module.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update({f"{prefix}scale": state.pop(f"{prefix}norm.weight")})
        )
        shards = list(strict.iter_zero_strict_state_dict(model, 1 << 20, only_rank_0=False))
        assert "scale" in shards[0][0]
        renamed.remove()
        model.module.register_state_dict_post_hook(_renames)
        text = refusal(lambda: list(strict.iter_zero_strict_state_dict(model, 1 << 20)))
        assert "twice" in text
        assert "unsharded" in text

    ranks.run(2, job)


@pytest.mark.parametrize(
    "arguments",
    [
        ({"dtype": "master"}, {"dtype": "compute"}),
        ({"only_rank_0": True}, {"only_rank_0": False}),
        ({"prefix": "a."}, {}),
        ({"strict": False}, {}),
    ],
    ids=["dtype", "only_rank_0", "prefix", "strict"],
)
def test_ranks_that_call_with_different_arguments(arguments: tuple[Any, Any]) -> None:
    def job() -> str:
        strict.install()
        model, _ = wrap()
        return refusal(lambda: model.state_dict(**arguments[dist.get_rank()]))

    for text in ranks.run(2, job, timeout=30):
        assert "different arguments" in text
        assert "rank 0" in text
        assert "rank 1" in text


def test_ranks_that_call_different_methods() -> None:
    def job() -> str:
        strict.install()
        model, _ = wrap()
        state = TinyGPT().state_dict()
        return refusal(lambda: model.load_state_dict(state) if dist.get_rank() else model.state_dict())

    for text in ranks.run(2, job, timeout=30):
        assert "load_state_dict" in text


def test_a_plain_module_is_refused() -> None:
    def job() -> str:
        return refusal(lambda: strict.zero_strict_state_dict(TinyGPT()))

    assert "not a ZeroDDP or GeminiDDP" in ranks.run(1, job)[0]


def test_the_live_module_is_whole_after_a_refusal() -> None:
    def job() -> None:
        model, _ = wrap()
        parameters = list(model.module.parameters())

        def fails(*_: Any) -> None:
            raise KeyError("a hook of the user's")

        hook = model.module.register_state_dict_post_hook(fails)
        assert "a hook of the user's" in refusal(lambda: strict.zero_strict_state_dict(model))
        assert all(a is b for a, b in zip(parameters, model.module.parameters(), strict=True))
        hook.remove()
        strict.zero_strict_state_dict(model)
        assert threading.active_count() < 50

    ranks.run(2, job)
