"""Test that parameter groups are matched by their settings, never by their position."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_ckpt_ext.errors import ModelMismatchError, UnsupportedCheckpointError
from mcore_ckpt_ext.megatron.live.param_groups import carried_groups, with_step
from mcore_ckpt_ext.optimizers.groups import with_defaults


def group(wd_mult: float = 1.0, parameters: int = 1, **values: Any) -> dict[str, Any]:
    identity = {"wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return {**identity, "params": list(range(parameters)), **values}


def test_the_order_of_groups_does_not_matter() -> None:
    stored = [group(0.0, weight_decay=0.0, lr=0.5, step=4), group(1.0, weight_decay=0.1, lr=0.5, step=4)]
    live = [group(1.0, weight_decay=9.0, lr=0.0), group(0.0, weight_decay=9.0, lr=0.0)]
    carried = carried_groups(live, stored)
    assert [(g["wd_mult"], g["weight_decay"], g["lr"], g["step"]) for g in carried] == [
        (1.0, 0.1, 0.5, 4),
        (0.0, 0.0, 0.5, 4),
    ]
    assert all("params" not in g for g in carried)


def test_repetitions_of_all_stages_are_one_group() -> None:
    stored = [group(1.0, step=4), group(0.0, step=4)] * 8
    assert len(carried_groups([group(0.0)], stored)) == 1


def test_learning_rate_bounds_tell_groups_apart_that_share_the_rest() -> None:
    stored = [group(max_lr=1.0, lr=0.5, step=4), group(max_lr=2.0, lr=0.7, step=4)]
    assert carried_groups([group(max_lr=2.0)], stored)[0]["lr"] == 0.7


def test_a_changed_learning_rate_alone_is_no_obstacle() -> None:
    assert carried_groups([group(max_lr=3.0)], [group(max_lr=1.0, lr=0.5, step=4)])[0]["lr"] == 0.5


def test_muon_and_adam_may_share_all_that_distinguishes_groups() -> None:
    stored = [group(momentum=0.9, lr=0.5), group(betas=(0.9, 0.99), eps=1e-8, lr=0.25, step=4)]
    muon, adam = carried_groups([group(momentum=0.0), group(betas=(0.5, 0.5), eps=0.0)], stored)
    assert (muon["lr"], muon["momentum"], "step" in muon) == (0.5, 0.9, False)
    assert (adam["lr"], adam["betas"], adam["step"]) == (0.25, (0.9, 0.99), 4)


def test_settings_only_of_the_live_group_stay() -> None:
    assert carried_groups([group(fused=True)], [group(lr=0.5)])[0]["fused"] is True


def test_nemo_prefixes_are_understood() -> None:
    plain = {"pre_wd_mult": 0.0, "pre_lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    assert carried_groups([group(0.0)], [{**plain, "lr": 0.5}])[0]["lr"] == 0.5


def test_experts_find_their_group_when_they_were_ordinary_parameters_before() -> None:
    stored = [group(1.0, lr=0.5, step=4), group(0.0, lr=0.25, step=4)]
    (carried,) = carried_groups([{**group(1.0), "is_expert_parallel": True}], stored)
    assert (carried["lr"], carried["is_expert_parallel"]) == (0.5, True)


def test_an_empty_group_without_counterpart_takes_the_step() -> None:
    assert carried_groups([group(0.0, parameters=0, lr=0.1)], [group(1.0, step=4)])[0] == {
        **{k: v for k, v in group(0.0, lr=0.1).items() if k != "params"},
        "step": 4,
    }


@pytest.mark.parametrize("stored", [[], [group(1.0)], [group(0.0, lr=1.0), group(0.0, lr=2.0)]])
def test_a_group_without_a_single_counterpart_is_refused(stored: list[dict[str, Any]]) -> None:
    with pytest.raises(ModelMismatchError, match="no single counterpart"):
        carried_groups([group(0.0)], stored)


def bounds_of(groups: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(one["max_lr"], one["min_lr"]) for one in groups]


def test_groups_keep_their_own_bounds_where_these_are_to_count() -> None:
    """Decoupled rates, and those of --use-mup, tell groups apart by nothing else."""
    stored = [group(max_lr=1.0, min_lr=0.1, lr=0.9, step=4), group(max_lr=2.0, min_lr=0.2, lr=1.9, step=4)]
    same = [group(max_lr=2.0, min_lr=0.2), group(max_lr=1.0, min_lr=0.1)]
    assert bounds_of(carried_groups(same, stored, own_bounds=True)) == [(2.0, 0.2), (1.0, 0.1)]
    assert [one["lr"] for one in carried_groups(same, stored, own_bounds=True)] == [1.9, 0.9]
    other = [group(max_lr=2.0, min_lr=0.2), group(max_lr=5.0, min_lr=0.5)]
    carried = carried_groups(other, stored, own_bounds=True)
    assert bounds_of(carried) == [(2.0, 0.2), (5.0, 0.5)]
    assert [one["step"] for one in carried] == [4, 4]


def test_a_group_that_differs_in_more_is_not_taken_for_another() -> None:
    stored = [group(max_lr=1.0, betas=(0.9, 0.9)), group(max_lr=2.0, betas=(0.5, 0.5))]
    with pytest.raises(ModelMismatchError, match="max_lr 1.0.*max_lr 2.0.*max_lr 5.0.*--override-opt_param-scheduler"):
        carried_groups([group(max_lr=5.0)], stored, own_bounds=True)


def test_bounds_that_a_job_did_not_have_are_not_dropped() -> None:
    """As with a --decoupled-lr that is new: copying the settings of the only group would make it as it was."""
    live, stored = [group(max_lr=1.0), group(max_lr=0.5)], [group(max_lr=1.0, lr=0.9, step=4)]
    with pytest.raises(ModelMismatchError, match=r"no single counterpart.*max_lr 1\.0.*max_lr 0\.5"):
        carried_groups(live, stored)
    carried = carried_groups(live, stored, own_bounds=True)
    assert [(one["max_lr"], one["step"]) for one in carried] == [(1.0, 4), (0.5, 4)]


def test_how_a_group_is_stepped_stays_the_live_jobs_own() -> None:
    """Classes and devices of HybridDeviceOptimizer, and torch's fused kernels, belong to the job, not to its state."""
    stored = group(lr=0.5, step=4, offload_fraction=0.5, cpu_optimizer_cls="AdamW", fused=True)
    (carried,) = carried_groups([group(lr=0.0, offload_fraction=1.0)], [stored])
    assert (carried["lr"], carried["step"], carried["offload_fraction"]) == (0.5, 4, 1.0)
    assert not {"cpu_optimizer_cls", "fused"} & carried.keys()


def test_a_step_that_is_there_twice_and_differs_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="steps 4, 5.*one step.*another iteration"):
        carried_groups([group()], [group(lr=0.5, step=4), group(lr=0.5, step=5)])


SCHEDULED = {"iteration": 4, "opt_param_scheduler": {"num_steps": 32}}


def test_a_step_that_was_not_written_is_that_of_the_other_groups() -> None:
    groups = with_step([group(eps=1e-8), group(0.0, eps=1e-8, step=3)], SCHEDULED, 8)
    assert [one["step"] for one in groups] == [3, 3]


def test_a_step_that_was_written_nowhere_follows_from_the_schedule() -> None:
    assert [one["step"] for one in with_step([group(eps=1e-8)], SCHEDULED, 8)] == [4]


@pytest.mark.parametrize(("samples", "batch_size"), [(24, 8), (32, None), (None, 8)])
def test_where_the_schedule_does_not_tell_the_step_it_is_refused(samples: int | None, batch_size: int | None) -> None:
    """An iteration that was skipped, or batches of several sizes."""
    common = {"iteration": 4, "opt_param_scheduler": {"num_steps": samples}}
    with pytest.raises(UnsupportedCheckpointError, match="number of Adam steps.*--no-load-optim"):
        with_step([group(eps=1e-8)], common, batch_size)


def test_muon_counts_no_steps_where_adam_does() -> None:
    """AdaptiveMuon has an eps, too."""
    stored = [group(momentum=0.9, beta2=0.95, eps=1e-8), group(0.0, eps=1e-8, step=3)]
    assert ["step" in one for one in with_step(stored, SCHEDULED, 8)] == [False, True]


def test_an_optimizer_without_steps_gets_none() -> None:
    assert "step" not in with_step([group(momentum=0.9)], SCHEDULED, None)[0]


def test_a_multiplier_that_a_writer_left_out() -> None:
    """Those of ms-swift 4.1 lack `lr_mult`; without `wd_mult`, the weight decay shows which group has none."""
    whole = [group(1.0, weight_decay=0.1, lr=0.5, step=4), group(0.0, weight_decay=0.0, lr=0.25, step=4)]
    live = [group(0.0), group(1.0)]
    for key in ("lr_mult", "wd_mult"):
        stored = [{name: value for name, value in one.items() if name != key} for one in whole]
        assert [one["lr"] for one in carried_groups(live, stored)] == [0.25, 0.5]
        assert [one[key] for one in with_defaults(stored)] == [one[key] for one in whole]


def test_a_multiplier_under_the_name_that_nemo_gives_it() -> None:
    (found,) = with_defaults([{"pre_wd_mult": 0.0, "pre_lr_mult": 2.0}])
    assert {"wd_mult", "lr_mult"}.isdisjoint(found)
