"""Test strict loading: a dict that PyTorch accepts goes into the masters, unrounded; any other changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai_on_cpu import ranks
from torch import nn

from mcore_ckpt_ext import zero_strict_state_dict as strict
from tests.colossalai.jobs import bits, gathered_masters, refusal, same_bits, train, wrap
from tests.colossalai.models import Everything, TinyGPT, gpt2, t5


def _tied(build: Callable[[], nn.Module], seed: int = 5) -> Any:
    torch.manual_seed(seed)
    return build().state_dict()


@pytest.mark.parametrize("build", [TinyGPT, Everything, gpt2, t5])
def test_a_plain_dict_is_taken_unrounded(build: Callable[[], nn.Module]) -> None:
    def job() -> None:
        model, _ = wrap(build)
        state = _tied(build)
        # The negative control: ColossalAI's own strict loading refuses it, and without `strict` it rounds.
        assert "Unexpected key" in refusal(lambda: model.load_state_dict(state))
        model.load_state_dict(state, strict=False)
        assert any(not torch.equal(value, state[name]) for name, value in gathered_masters(model).items())
        assert "matched" in str(strict.zero_strict_load_state_dict(model, state))
        masters = gathered_masters(model)
        assert same_bits(masters, {name: state[name] for name in masters})

    for world_size in (1, 2):
        ranks.run(world_size, job)


def test_forward_uses_loaded_masters() -> None:
    def job() -> None:
        model, optimizer = wrap()
        train(model, optimizer, range(1))
        state = _tied(TinyGPT)
        strict.zero_strict_load_state_dict(model, state)
        plain = TinyGPT()
        plain.load_state_dict(state)
        tokens = torch.arange(12).view(2, 6)
        with torch.no_grad():
            assert torch.equal(model(tokens), plain.bfloat16()(tokens))

    for world_size in (1, 2):
        ranks.run(world_size, job)


def test_pinned_copies_are_not_taken_for_current() -> None:
    def job() -> None:
        model, _ = wrap(pin_memory=True)
        state = _tied(TinyGPT)
        strict.zero_strict_load_state_dict(model, state)
        for chunk in model.chunk_manager.get_chunks([*model.fp16_params, *model.fp32_params]):
            model.chunk_manager.move_chunk(chunk, torch.device("cpu"))
        plain = TinyGPT()
        plain.load_state_dict(state)
        tokens = torch.arange(12).view(2, 6)
        assert torch.equal(model(tokens), plain.bfloat16()(tokens))

    ranks.run(2, job)


@pytest.mark.parametrize("kept", ["wte.weight", "lm_head.weight"])
def test_ties_may_come_under_any_name(kept: str) -> None:
    def job() -> None:
        model, _ = wrap()
        state = _tied(TinyGPT)
        for name in {"wte.weight", "lm_head.weight"} - {kept}:
            del state[name]
        before = dict(state)
        assert "matched" in str(strict.zero_strict_load_state_dict(model, state))
        assert torch.equal(gathered_masters(model)["wte.weight"], state[kept])
        assert list(state) == list(before), "the caller's dict was changed"

    ranks.run(2, job)


def test_buffers_extra_state_frozen_and_ignored() -> None:
    def job() -> None:
        model, _ = wrap(Everything, ignore=("ignored",))
        state = _tied(Everything)
        state["counted._extra_state"] = state["again._extra_state"] = {"seen": 11}
        state["steps"] = torch.tensor([12])
        state["scale"] = torch.full_like(state["scale"], 1 / 3)
        state["ignored"] = torch.full_like(state["ignored"], 1 / 7)
        strict.zero_strict_load_state_dict(model, state)
        module = model.module
        assert module.counted.seen == 11
        assert module.steps.item() == 12
        assert torch.equal(module.scale, state["scale"].bfloat16())
        assert torch.equal(module.ignored, state["ignored"].bfloat16())
        assert torch.equal(module.frozen.weight, state["frozen.weight"].bfloat16())

    ranks.run(2, job)


def test_missing_and_unexpected_keys_in_pytorchs_words_and_nothing_is_written() -> None:
    def job() -> None:
        model, _ = wrap(Everything)
        before = gathered_masters(model)
        state = _tied(Everything)
        state["counted._extra_state"] = state["again._extra_state"] = {"seen": 99}
        del state["norm.bias"]
        state["more"] = torch.ones(1)
        state["norm.weight"] = torch.ones(3)
        ours = refusal(lambda: strict.zero_strict_load_state_dict(model, state))
        theirs = refusal(lambda: Everything().load_state_dict(state))
        for line in theirs.splitlines()[1:]:
            assert line in ours
        assert "rank 0, 1" in ours
        assert same_bits(gathered_masters(model), before)
        assert model.module.counted.seen == 3
        try:
            strict.zero_strict_load_state_dict(model, state)
        except RuntimeError:
            pass
        else:
            raise AssertionError("PyTorch's users catch a RuntimeError")

    ranks.run(2, job)


def test_not_strict_reports_and_loads_the_rest() -> None:
    def job() -> None:
        model, _ = wrap()
        state = _tied(TinyGPT)
        del state["norm.bias"]
        state["more"] = torch.ones(1)
        before = gathered_masters(model)["norm.bias"]
        answer = strict.zero_strict_load_state_dict(model, state, strict=False)
        assert (answer.missing_keys, answer.unexpected_keys) == (["norm.bias"], ["more"])
        masters = gathered_masters(model)
        assert torch.equal(masters["norm.bias"], before)
        assert torch.equal(masters["norm.weight"], state["norm.weight"])

    ranks.run(2, job)


def test_names_of_one_tensor_with_different_values_are_refused() -> None:
    def job() -> None:
        model, _ = wrap()
        state = dict(_tied(TinyGPT))
        state["lm_head.weight"] = state["lm_head.weight"] + 1
        text = refusal(lambda: strict.zero_strict_load_state_dict(model, state))
        assert "different values" in text
        assert "wte.weight" in text

    ranks.run(2, job)


class Doubled(nn.Module):
    """Saves twice its weight, and copies half of what it loads from a tensor that it changes afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}doubled"] = self.weight.detach() * 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
        halved = state_dict[f"{prefix}doubled"] / 2
        self.weight.data.copy_(halved)
        halved.zero_()


class LoadsItself(TinyGPT):
    """Layers whose hooks change their parameters in place, and replace them; a method that takes no `assign`."""

    def __init__(self) -> None:
        super().__init__()
        self.doubled = Doubled()
        self.batch_norm = nn.BatchNorm1d(4)
        self.layers[1].register_load_state_dict_post_hook(self._changes)
        self.layers[2].register_load_state_dict_post_hook(self._replaces)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        return super().load_state_dict(state_dict, strict)

    def _changes(self, layer: Any, _: Any) -> None:
        layer.weight.data.mul_(2)
        layer.bias.data[1:].zero_()

    def _replaces(self, layer: Any, _: Any) -> None:
        layer.weight = nn.Parameter(layer.weight.detach() * 3)
        layer.bias.data = layer.bias.data + 1


@pytest.mark.parametrize("first_only", [False, True])
def test_modules_that_load_themselves_and_hooks_that_change_what_was_loaded(first_only: bool) -> None:
    def job() -> None:
        model, _ = wrap(LoadsItself)
        state = _tied(LoadsItself)
        state["layers.0.weight"] = torch.arange(32 * 32).view(32, 32)
        before, metadata = {name: bits(value).clone() for name, value in state.items()}, repr(state._metadata)
        plain = LoadsItself()
        plain.load_state_dict(state)
        strict.zero_strict_load_state_dict(model, {} if first_only and dist.get_rank() else state)
        assert same_bits(strict.zero_strict_state_dict(model, only_rank_0=False), plain.state_dict())
        assert all(torch.equal(bits(value), before[name]) for name, value in state.items())
        # A later load of the same dict would keep its tensors instead of copying them.
        assert repr(state._metadata) == metadata

    ranks.run(2, job)


def test_a_hook_that_needs_a_value_that_is_missing_is_refused() -> None:
    def job() -> None:
        model, _ = wrap(LoadsItself)
        before = gathered_masters(model)
        state = _tied(LoadsItself)
        del state["layers.1.weight"]
        assert 'Missing key(s) in state_dict: "layers.1.weight"' in refusal(
            lambda: strict.zero_strict_load_state_dict(model, state)
        )
        text = refusal(lambda: strict.zero_strict_load_state_dict(model, {0: {"step": torch.ones(1)}}))
        assert "booster.load_optimizer" in text
        text = refusal(lambda: strict.zero_strict_load_state_dict(model, state, strict=False))
        assert "not been loaded" in text
        assert "where: layers.1.weight" in text
        assert same_bits(gathered_masters(model), before)

    ranks.run(2, job)


def test_hooks_of_the_wrapper_are_called_with_it() -> None:
    def job() -> None:
        model, _ = wrap()
        called = []
        model.register_state_dict_pre_hook(lambda module, *_: called.append(module))
        model.register_load_state_dict_pre_hook(lambda module, state, *_: called.append(state.pop("more") and module))
        model.register_load_state_dict_post_hook(lambda module, _: called.append(module))
        state = strict.zero_strict_state_dict(model, only_rank_0=False)
        strict.zero_strict_load_state_dict(model, {**state, "more": torch.ones(1)})
        assert called == [model, model, model]
        assert not model.module._load_state_dict_pre_hooks

    ranks.run(1, job)
