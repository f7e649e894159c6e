"""Test that two live states are equal if all bits are, whatever their layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext.selftest.state import Piece, State, differences, number_of_elements

WHOLE = torch.arange(24, dtype=torch.float32).view(4, 6)


def piece(values: torch.Tensor, *offset: int, kind: str = "exp_avg", held: torch.Tensor | None = None) -> Piece:
    return Piece(kind, "layer.weight", (4, 6), offset, 0, values.clone(), held)


def in_columns() -> State:
    """Two tensor-parallel ranks."""
    return State([piece(WHOLE[:, :3], 0, 0), piece(WHOLE[:, 3:], 0, 3)])


def in_ranges() -> State:
    """Two data-parallel ranks, of which each holds a half of the elements."""
    first = torch.arange(24).view(4, 6) < 10
    zero = torch.zeros(())
    return State([
        piece(torch.where(first, WHOLE, zero), 0, 0, held=first),
        piece(torch.where(first, zero, WHOLE), 0, 0, held=~first),
    ])  # fmt: skip


def test_layouts_do_not_matter(tmp_path: Path) -> None:
    for rank, one in enumerate(in_columns().pieces):
        State([one]).save(tmp_path / f"rank_{rank:05d}.pt")
    saved = State.load(tmp_path)
    assert differences(saved, in_ranges()) == differences(in_ranges(), saved) == []
    assert number_of_elements(saved) == number_of_elements(in_ranges()) == 24


@pytest.mark.parametrize("other", [float("nan"), 18.000002])
def test_one_element(other: float) -> None:
    loaded = in_ranges()
    loaded.pieces[1].values[3, 0] = other
    assert differences(in_columns(), loaded) == ["exp_avg.layer.weight differs"]


def test_the_sign_of_a_zero() -> None:
    loaded = in_columns()
    loaded.pieces[0].values[0, 0] = -0.0
    assert differences(in_columns(), loaded) == ["exp_avg.layer.weight differs"]


def test_elements_that_no_rank_holds() -> None:
    loaded = State(in_columns().pieces[:1])
    assert differences(in_columns(), loaded) == ["exp_avg.layer.weight differs"]
    assert differences(in_columns(), State()) == ["exp_avg.layer.weight differs"]
    assert differences(State(), in_columns()) == ["exp_avg.layer.weight differs"]


def test_another_dtype() -> None:
    loaded = State([piece(WHOLE.double(), 0, 0)])
    assert differences(in_columns(), loaded) == ["exp_avg.layer.weight differs"]


def test_replicas_that_differ_at_the_save() -> None:
    """A load may take either; a mixture is neither."""
    saved = State([piece(WHOLE, 0, 0), piece(WHOLE + 1, 0, 0)])
    assert differences(saved, State([piece(WHOLE + 1, 0, 0)])) == []
    assert differences(saved, State([piece(WHOLE + 1, 0, 0), piece(WHOLE, 0, 0)])) == []
    assert differences(saved, State([piece(torch.where(WHOLE > 3, WHOLE, WHOLE + 1), 0, 0)])) != []


def test_stacked_layers() -> None:
    def layer(number: int, values: torch.Tensor) -> Piece:
        return Piece("weight", "layers.weight", (2, 3), (number, 0), 1, values)

    saved = State([layer(0, torch.zeros(3)), layer(1, torch.ones(3))])
    assert differences(saved, State([layer(1, torch.ones(3)), layer(0, torch.zeros(3))])) == []
    assert differences(saved, State([layer(0, torch.ones(3)), layer(1, torch.zeros(3))])) != []


def test_steps_and_progress() -> None:
    saved = State(settings={"a": {"step": 3.0}}, progress={"iteration": 3})
    assert differences(saved, State(settings={"a": {"step": 3.0}}, progress={"iteration": 3})) == []
    (line,) = differences(saved, State(settings={"a": {"step": 0.0}}, progress={"iteration": 3}))
    assert line == "the settings of a: {'step': 3.0} at the save, {'step': 0.0} after the load"
    assert differences(saved, State(settings={"a": {"step": 3.0}})) != []


def test_many_differences_are_counted() -> None:
    names = [f"layer{number}" for number in range(9)]
    saved = State([Piece("weight", name, (1,), (0,), 0, torch.zeros(1)) for name in names])
    loaded = State([Piece("weight", name, (1,), (0,), 0, torch.ones(1)) for name in names])
    found = differences(saved, loaded)
    assert (len(found), found[-1]) == (6, "4 more of 9 tensors differ")
