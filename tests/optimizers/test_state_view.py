"""Test optimizer states as data: replaced parts, and several states joined into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mcore_ckpt_ext import open_checkpoint
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.optimizers.state_view import StateView, join_states
from tests.harness.checkpoints import fixture_named


def part(state: OptimizerState, names: Sequence[str], source: str, distributed: bool) -> StateView:
    """The state of some parameters."""
    return replace(
        StateView.of(state),
        names=lambda kind=None: [name for name in state.names(kind) if name in names],
        dtypes_of=lambda name: state.dtypes_of(name) if name in names else {},
        is_distributed=lambda name: distributed,
        order_sources=lambda: [source],
        shifted=names[:1],
        lost_elements=lambda: {names[0]: 3},
    )


def test_each_state_answers_for_its_own_parameters() -> None:
    state = open_checkpoint(fixture_named("p04").run).optimizer.state()
    names = state.names()
    first, second = part(state, names[:5], "one", True), part(state, names[5:], "another", False)
    both = join_states([first, second])
    assert (both.kinds, both.carried_kinds, both.names()) == (state.kinds, state.carried_kinds, names)
    assert sorted(both.names("exp_avg")) == sorted(state.names("exp_avg"))
    assert [both.is_distributed(name) for name in (names[0], names[5])] == [True, False]
    assert both.order_sources() == ["another", "one"]
    assert both.shifted == [names[0], names[5]]
    assert both.lost_elements() == {names[0]: 3, names[5]: 3}
    for name in names:
        assert both.logical_tensor("exp_avg", name) == state.logical_tensor("exp_avg", name)
        assert (
            both.stored_slices("exp_avg", name)
            == both.slots("exp_avg", name)
            == state.stored_slices("exp_avg", name)
            != []
        )
        assert both.copies("exp_avg", name) == state.copies("exp_avg", name)


def test_a_parameter_of_none_of_them_has_no_state() -> None:
    state = open_checkpoint(fixture_named("p04").run).optimizer.state()
    names = state.names()
    both = join_states([part(state, names[:1], "one", False), part(state, names[1:2], "another", False)])
    assert both.logical_tensor("exp_avg", names[2]) is None
    assert (
        both.stored_slices("exp_avg", names[2])
        == both.copies("exp_avg", names[2])
        == both.lost_intervals("exp_avg", names[2])
        == []
    )
    assert both.derivation("exp_avg", names[2]) is None
    assert both.is_distributed(names[2])


def test_one_state_stays_itself() -> None:
    state = open_checkpoint(fixture_named("p04").run).optimizer.state()
    assert join_states([state]) is state
