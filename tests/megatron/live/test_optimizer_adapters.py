"""Test masters that an adapter replaces: every tensor or view that refers to them has the new values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mcore_ckpt_ext.megatron.live.model import LiveParameter
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import LiveShard
from mcore_ckpt_ext.megatron.live.optimizer_adapters.offloaded import OffloadedAdapter
from mcore_ckpt_ext.megatron.live.optimizer_adapters.undistributed import UndistributedAdapter
from mcore_ckpt_ext.model_space.slices import Region, Slice

SHAPE = (2, 3)
NEW = torch.arange(6.0)


def held(master: torch.Tensor, weight: torch.Tensor) -> tuple[UndistributedAdapter, LiveShard]:
    """A home of one master, and of one weight that may be the master."""
    groups = [[weight]], [[master]]
    inner = torch.optim.AdamW([master])
    optimizer = SimpleNamespace(optimizer=inner, float16_groups=groups[0], fp32_from_float16_groups=groups[1])
    adapter = UndistributedAdapter(optimizer)
    own = LiveParameter(weight, (Region.whole("weight", SHAPE),), {}, may_pad=False)
    return adapter, LiveShard(own, Slice.whole(own.regions), (), adapter)


@pytest.mark.parametrize("who", ["alone", "viewed", "a view", "the weight"])
def test_masters_that_a_home_takes_over_are_seen_by_all(who: str) -> None:
    whole = torch.zeros(8)
    master = torch.nn.Parameter(whole[:6].view(SHAPE) if who == "a view" else torch.zeros(SHAPE))
    weight = master if who == "the weight" else torch.zeros(SHAPE, dtype=torch.bfloat16)
    view = master.detach()[1:] if who == "viewed" else None
    adapter, shard = held(master, weight)
    values = adapter.room(shard).copy_(NEW)
    place = values.data_ptr()
    room = adapter.set_master(shard, values)
    assert torch.equal(master.detach(), NEW.view(SHAPE)) and torch.equal(adapter.master(shard), NEW)
    assert (master.data_ptr() == place) == (who == "alone")  # only there memory is exchanged
    assert view is None or torch.equal(view, NEW.view(SHAPE)[1:])
    assert who != "a view" or torch.equal(whole[:6], NEW)
    room.fill_(7.0)  # what is given back is nobody's
    assert room.shape == NEW.shape and torch.equal(master.detach(), NEW.view(SHAPE))


def test_the_step_of_offloaded_parameters_is_in_the_optimizer_that_steps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own class, which copies its outer groups over the inner ones before each step."""
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    weight = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16))
    hybrid = HybridDeviceOptimizer(
        [weight], 0.5, torch.optim.AdamW, torch.optim.AdamW, param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False, lr=0.5,
    )  # fmt: skip
    places = {weight: (0, 0)}
    adapter = OffloadedAdapter(SimpleNamespace(optimizer=hybrid, grad_scaler=None, model_param_group_index_map=places))
    assert adapter.kind == "CPU offload of 0.5"
    adapter.finish([{"lr": 0.25, "step": 7}], None)
    (inner,) = hybrid.sub_optimizers
    hybrid._sync_hdo_param_groups_to_sub_optimizers()
    assert [(group["lr"], "step" in group) for group in inner.param_groups] == [(0.25, False)]
    assert [state["step"].item() for state in inner.state.values()] == [7]
    own = LiveParameter(weight, (Region.whole("weight", SHAPE),), {}, may_pad=False)
    shard = LiveShard(own, Slice.whole(own.regions), (), adapter)
    master = adapter.master(shard)
    place = master.data_ptr()
    adapter.set_master(shard, NEW)
    assert torch.equal(adapter.master(shard), NEW) and adapter.master(shard).data_ptr() == place  # it may be pinned
