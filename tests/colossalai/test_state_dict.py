"""Test that the strict state dict is that of the unwrapped module, with the masters' values."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai_on_cpu import ranks
from torch import nn

from mcore_ckpt_ext import zero_strict_state_dict as strict
from tests.colossalai.jobs import bits, gathered_masters, refusal, same_bits, train, wrap
from tests.colossalai.models import HIDDEN, Everything, TinyGPT, gpt2, t5

WORLDS = (1, 2)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("build", [TinyGPT, Everything, gpt2, t5])
def test_keys_order_metadata_and_aliases_are_those_of_the_module(
    build: Callable[[], nn.Module], world_size: int
) -> None:
    def job() -> None:
        plain = build().state_dict()
        model, _ = wrap(build)
        state = strict.zero_strict_state_dict(model, only_rank_0=False)
        assert list(state) == list(plain)
        assert state._metadata == plain._metadata  # type: ignore[attr-defined]
        assert _aliases(state) == _aliases(plain)
        assert {k: v.shape for k, v in _tensors(state)} == {k: v.shape for k, v in _tensors(plain)}
        assert {k: v.dtype for k, v in _tensors(state)} == {k: v.dtype for k, v in _tensors(plain)}
        # The negative control: ColossalAI's own dict is not it, as soon as there is more than parameters.
        own = model.state_dict(only_rank_0=False)
        assert own._metadata != plain._metadata  # type: ignore[attr-defined]
        if build in (Everything, t5):
            assert list(own) != list(plain)

    ranks.run(world_size, job)


def test_extra_state_and_buffers() -> None:
    def job() -> None:
        model, _ = wrap(Everything, ignore=("ignored",))
        state = strict.zero_strict_state_dict(model, only_rank_0=False)
        assert state["counted._extra_state"] == state["again._extra_state"] == {"seen": 3}
        assert "mask" not in state
        assert "absent" not in state
        assert state["steps"].dtype == torch.int64
        module = model.module
        for name in ("scale", "frozen.weight", "ignored"):
            live = module.get_buffer(name) if name == "scale" else module.get_parameter(name)
            # ColossalAI rounded them when it wrapped the module; fp32 holds them exactly, in memory of their own.
            assert live.dtype == torch.bfloat16
            assert torch.equal(state[name], live.float())
            live.data.add_(1)
            assert not torch.equal(state[name], live.float())

    ranks.run(2, job)


class Strided(TinyGPT):
    """A frozen parameter and a buffer with strides of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(HIDDEN, 2 * HIDDEN).t(), requires_grad=False)
        self.register_buffer("image", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))


@pytest.mark.parametrize("keep_vars", [True, False])
def test_types_and_strides_are_those_of_pytorch(keep_vars: bool) -> None:
    def job() -> None:
        plain = Strided().state_dict(keep_vars=keep_vars)
        state = strict.zero_strict_state_dict(wrap(Strided)[0], keep_vars=keep_vars, only_rank_0=False)
        assert {name: type(value) for name, value in state.items()} == {n: type(v) for n, v in plain.items()}
        assert {name: value.stride() for name, value in state.items()} == {n: v.stride() for n, v in plain.items()}
        assert {name: value.requires_grad for name, value in state.items()} == {
            name: value.requires_grad for name, value in plain.items()
        }

    ranks.run(2, job)


@pytest.mark.parametrize("world_size", WORLDS)
def test_prefix_and_destination_as_in_pytorch(world_size: int) -> None:
    def job() -> None:
        model, _ = wrap(Everything)
        plain = Everything().state_dict(prefix="model.")
        state = strict.zero_strict_state_dict(model, prefix="model.", only_rank_0=False)
        assert list(state) == list(plain)
        assert state._metadata == plain._metadata  # type: ignore[attr-defined]
        destination: dict[str, Any] = OrderedDict(before=1)
        assert strict.zero_strict_state_dict(model, destination=destination, only_rank_0=False) is destination
        assert list(destination) == ["before", *Everything().state_dict()]

    ranks.run(world_size, job)


def test_values_in_each_dtype() -> None:
    def job(dtype: torch.dtype) -> None:
        model, optimizer = wrap(dtype=dtype)
        train(model, optimizer, range(3))
        masters = gathered_masters(model)
        exact = strict.zero_strict_state_dict(model, only_rank_0=False)
        assert same_bits({k: exact[k] for k in masters}, masters)
        own = model.state_dict(only_rank_0=False)
        assert any(not torch.equal(own[name].float(), masters[name]) for name in masters)
        assert same_bits(strict.zero_strict_state_dict(model, only_rank_0=False, dtype="compute"), own)
        double = strict.zero_strict_state_dict(model, only_rank_0=False, dtype=torch.float64)
        assert all(torch.equal(double[name], value.double()) for name, value in masters.items())

    for dtype in (torch.bfloat16, torch.float16):
        ranks.run(2, job, dtype)


def test_ties_share_copy_or_omit() -> None:
    def job() -> None:
        model, _ = wrap()
        shared = strict.zero_strict_state_dict(model, only_rank_0=False)
        assert shared["wte.weight"].data_ptr() == shared["lm_head.weight"].data_ptr()
        assert "matched" in str(TinyGPT().load_state_dict(shared))
        copied = strict.zero_strict_state_dict(model, only_rank_0=False, ties="copy")
        assert copied["wte.weight"].data_ptr() != copied["lm_head.weight"].data_ptr()
        assert same_bits(copied, shared)
        omitted = strict.zero_strict_state_dict(model, only_rank_0=False, ties="omit")
        assert [name for name in shared if name not in omitted] == ["lm_head.weight"]
        # The caller's own entries stay as they are, tied or not.
        callers = torch.ones(2)
        destination: Any = OrderedDict(first=callers, second=callers)
        strict.zero_strict_state_dict(model, destination=destination, only_rank_0=False, ties="omit")
        assert list(destination) == ["first", "second", *omitted]
        assert destination["second"] is callers
        assert '"copy" (a storage each)' in refusal(lambda: strict.zero_strict_state_dict(model, ties="none"))

    ranks.run(2, job)


def test_rank_0_has_it_all_and_the_others_nothing() -> None:
    def job() -> None:
        model, _ = wrap()
        if dist.get_rank() == 1:
            # A rank that comes late is waited for.
            time.sleep(0.5)
        state = strict.zero_strict_state_dict(model)
        everywhere = strict.zero_strict_state_dict(model, only_rank_0=False)
        assert same_bits(state, everywhere) if dist.get_rank() == 0 else state == OrderedDict()
        sums = [None, None]
        dist.all_gather_object(sums, {name: bits(value).sum() for name, value in everywhere.items()})
        assert sums[0] == sums[1]

    ranks.run(2, job)


def test_saving_changes_nothing() -> None:
    def losses_of(saves: bool) -> list[float]:
        model, optimizer = wrap(Everything, ignore=("ignored",))
        losses = train(model, optimizer, range(2))
        if saves:
            state = strict.zero_strict_state_dict(model, only_rank_0=False)
            static = strict.get_static_torch_model(model, only_rank_0=False)
            list(strict.iter_zero_strict_state_dict(model, 1))
            before = {name: value.clone() for name, value in _tensors(state)}
        losses += train(model, optimizer, range(2, 5))
        if saves:
            assert same_bits(dict(_tensors(state)), before)
            assert same_bits(dict(_tensors(static.state_dict())), before)
        return losses

    def job() -> None:
        assert losses_of(saves=True) == losses_of(saves=False)

    for world_size in WORLDS:
        ranks.run(world_size, job)


@pytest.mark.parametrize("build", [TinyGPT, Everything])
def test_the_static_model_is_an_ordinary_one(build: Callable[[], nn.Module]) -> None:
    def job() -> None:
        model, optimizer = wrap(build, ignore=("ignored",) if build is Everything else ())
        train(model, optimizer, range(3))
        state = strict.zero_strict_state_dict(model)
        static = strict.get_static_torch_model(model)
        if dist.get_rank():
            assert static is None
            return
        assert same_bits(dict(_tensors(static.state_dict())), dict(_tensors(state)))
        assert static.lm_head.weight is static.wte.weight
        assert type(static.wte.weight) is nn.Parameter
        plain = build()
        plain.load_state_dict(state)
        tokens = torch.arange(12).view(2, 6)
        assert torch.equal(static.eval()(tokens), plain.eval()(tokens))
        # It can also be trained.
        static(tokens).sum().backward()
        assert static.wte.weight.grad is not None

    ranks.run(2, job)


class _Uncopyable(TinyGPT):
    """What modules hold that ``copy.deepcopy`` refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.group = dist.group.WORLD
        self.locks = {"lock": threading.Lock(), "again": [threading.RLock()]}
        self.generator = torch.Generator().manual_seed(3)
        # The older one, which leaves a computed tensor in the place of the weight.
        self.normed = torch.nn.utils.weight_norm(nn.Linear(HIDDEN, HIDDEN))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.normed(self.wte(tokens)).sum()


def test_static_models_of_modules_that_cannot_be_copied() -> None:
    def job() -> None:
        model, optimizer = wrap(_Uncopyable)
        tokens = torch.arange(12).view(2, 6)
        train(model, optimizer, range(1))
        model.module.locks["lock"].acquire()
        static = strict.get_static_torch_model(model, only_rank_0=False)
        assert static.group is dist.group.WORLD
        assert static.locks["lock"] is not model.module.locks["lock"]
        assert not static.locks["lock"].locked()
        expected = torch.rand(3, generator=static.generator)
        assert torch.equal(torch.rand(3, generator=model.module.generator), expected)
        plain = _Uncopyable()
        plain.load_state_dict(strict.zero_strict_state_dict(model, only_rank_0=False))
        assert torch.equal(static(tokens), plain(tokens))

    ranks.run(2, job)


def test_shards_are_bounded_and_complete() -> None:
    def job() -> None:
        model, _ = wrap(Everything)
        whole = strict.zero_strict_state_dict(model, only_rank_0=False)
        limit = 9000
        shards = list(strict.iter_zero_strict_state_dict(model, limit, only_rank_0=False))
        assert len(shards) > 3
        merged = {name: value for shard, _ in shards for name, value in shard.items()}
        assert set(merged) == set(whole)
        assert all(same_bits({"": merged[name]}, {"": value}) for name, value in _tensors(whole))
        for shard, size in shards:
            storages = {value.data_ptr(): value.nbytes for _, value in _tensors(shard)}
            assert sum(storages.values()) == size
            assert size <= limit or len(storages) == 1
        assert merged["wte.weight"].data_ptr() == merged["lm_head.weight"].data_ptr()
        # The other ranks see as many shards, and nothing in them.
        first = list(strict.iter_zero_strict_state_dict(model, limit))
        assert [size for _, size in first] == [size for _, size in shards]
        assert dist.get_rank() == 0 or not any(shard for shard, _ in first)

    ranks.run(2, job)


def _tensors(state: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in state.items() if isinstance(value, torch.Tensor)]


def _aliases(state: Any) -> list[list[str]]:
    """Names of one storage, as groups in the order of the dict."""
    groups: dict[int, list[str]] = {}
    for name, value in _tensors(state):
        groups.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    return sorted(names for names in groups.values() if len(names) > 1)
