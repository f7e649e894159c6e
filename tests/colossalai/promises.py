"""What this package promises of a trained GeminiDDP, checked on the devices that ColossalAI uses.

`test_promises.py` checks it where these are redirected to the CPU, `gpu_rank.py` on real GPUs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten

from mcore_ckpt_ext import zero_strict_state_dict as strict
from tests.colossalai.jobs import PLACEMENTS, bits, gathered_masters, refusal, same_bits, train, wrap
from tests.colossalai.models import Everything, Wide

BEFORE, MORE = range(2), range(2, 4)
MIB = 1 << 20
# As in test_memory.py, where it also covers what else a process allocates.
_LITTLE = 64 * MIB


def check_a_resume(build: Callable[[], nn.Module], placement: str, dtype: torch.dtype) -> str:
    """Train, save, and load into another model; return where ColossalAI has the masters: "cuda" or "cpu"."""
    ignored = ("ignored",) if build is Everything else ()

    def job(seed: int) -> tuple[Any, Any]:
        return wrap(build, ignore=ignored, seed=seed, dtype=dtype, **PLACEMENTS[placement])

    model, optimizer = job(seed=0)
    train(model, optimizer, BEFORE)
    own = model.state_dict(only_rank_0=False)
    strict.install()
    try:
        state = model.state_dict(strict=True, only_rank_0=False)
        _check_state_dict(model, build(), state, own)
        other, other_optimizer = job(seed=1)
        _check_loading(other, build(), state)
        assert same_bits(gathered_masters(other), gathered_masters(model))
        assert identical(other._non_strict_state_dict(only_rank_0=False), own), "the rounded weights are others"
        saved = optimizer.state_dict(only_rank_0=False)
        other_optimizer.load_state_dict(saved)
        again = other_optimizer.state_dict(only_rank_0=False)
        assert identical(again["state"], saved["state"])
        assert again["param_groups"] == saved["param_groups"]
        uninterrupted, resumed = train(model, optimizer, MORE), train(other, other_optimizer, MORE)
        (device,) = {chunk.device_type for chunk in model.chunk_manager.get_chunks(model.fp32_params)}
        # The bias corrections of the kernel for the CPU depend on the steps since it was made, in the last bit
        # (0.5.0, csrc/kernel/x86/cpu_adam.h, IncrementStep); gradients in bf16 are not for it (hybrid_adam.py, step).
        steps = 1 if (device, dtype) == ("cpu", torch.float16) else len(MORE)
        assert resumed[:steps] == uninterrupted[:steps]
    finally:
        strict.uninstall()
    return str(device)


def _check_state_dict(model: Any, plain: nn.Module, state: Any, own: Any) -> None:
    """Compare with a plain module that is given the same values."""
    masters = gathered_masters(model)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(masters.get(name, model.module.get_parameter(name)))
        for name, buffer in plain.named_buffers():
            buffer.copy_(model.module.get_buffer(name))
    expected: Any = plain.state_dict()
    assert identical(state, expected)
    assert state._metadata == expected._metadata
    run_on_first = model.state_dict(strict=True)
    assert identical(run_on_first, expected) if dist.get_rank() == 0 else not run_on_first
    assert identical(model._non_strict_state_dict(only_rank_0=False), own)
    assert identical(model.state_dict(strict=False, only_rank_0=False), own)
    assert not identical(own, expected), "ColossalAI rounds"


def _check_loading(model: Any, plain: nn.Module, state: Any) -> None:
    """Load into a model that has other values, after a dict that does not fit has changed nothing."""
    before = gathered_masters(model)
    *_, lacking = before
    spoilt = {name: value for name, value in state.items() if name != lacking} | {"more": torch.ones(1)}
    ours = refusal(lambda: model.load_state_dict(spoilt, strict=True))
    theirs = refusal(lambda: plain.load_state_dict(spoilt, strict=True))
    assert "Missing key(s)" in theirs
    assert "Unexpected key(s)" in theirs
    assert all(line in ours for line in theirs.splitlines()[1:])
    assert same_bits(gathered_masters(model), before)
    assert any(not torch.equal(before[name], state[name]) for name in before)
    assert "matched" in str(model.load_state_dict(state, strict=True))


def identical(left: Any, right: Any) -> bool:
    """Return True for equal nested dicts and lists: keys in their order, dtypes, and every bit of tensors."""
    (values, form), (others, other_form) = tree_flatten(left), tree_flatten(right)
    return form == other_form and all(map(_identical_values, values, others))


def _identical_values(left: Any, right: Any) -> bool:
    if not isinstance(left, torch.Tensor):
        return type(left) is type(right) and bool(left == right)
    return (left.shape, left.dtype) == (right.shape, right.dtype) and torch.equal(bits(left), bits(right))


def check_device_memory() -> dict[str, float]:
    """Return the peaks of saving and loading in MiB, each at most its output and one chunk; nothing of it stays."""
    chunk = 2 * Wide.WIDTH**2
    model, _ = wrap(Wide, chunk_size=chunk)
    strict.install()
    try:
        state = model.state_dict()
        calls: dict[str, tuple[Callable[[], Any], int]] = {
            "to the CPU": (model.state_dict, 0),
            "to the GPU": (lambda: model.state_dict(device="cuda"), Wide.LAYERS * Wide.WIDTH**2 * 4),
            "load": (lambda: model.load_state_dict(state), 0),
        }
        return {name: _peak(call, output + 4 * chunk + _LITTLE) / MIB for name, (call, output) in calls.items()}
    finally:
        strict.uninstall()


def _peak(call: Callable[[], Any], bound: int) -> int:
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= bound, f"{peak} bytes, expected at most {bound}"
    del result
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    return peak
