"""Test a row of the table of arguments: its attribute, and the meaning of its columns."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_ckpt_ext.job.arguments.kinds import ABOVE_ZERO, REQUIRED, SWITCH, TEXT
from mcore_ckpt_ext.job.arguments.row import (
    CHANGES,
    NOTHING,
    SAME,
    Argument,
    CompleteArguments,
    Condition,
    PartialArguments,
    bridge,
    changes,
    off,
    reads,
    rows_of,
    switch,
    value,
)
from mcore_ckpt_ext.versions import KNOWN, Version

WITH_WHEELS, ON_ICE = Condition("wheels"), Condition("ground", "ice")


class Table:
    """Rows of arguments that no job has."""

    wheels = Argument(ABOVE_ZERO.optional, CHANGES, value(), bridge(name="num_wheels"))
    brakes = Argument(SWITCH.default(True), changes(WITH_WHEELS, neutral=None), off("--no-brakes", WITH_WHEELS))
    ground = Argument(TEXT.required, NOTHING, value(unless=WITH_WHEELS, without="sand"), since="0.12", until="0.15")
    chains = Argument(SWITCH.default(False), flag=switch(spelled="--with-chains"), bridge=bridge(ON_ICE, WITH_WHEELS))


class Vehicle(Table, PartialArguments):
    """A job."""

    def value_of(self, name: str) -> Any:
        return {"wheels": 4.0, "ground": "ice"}.get(name)


class Model(Table, CompleteArguments):
    """A model."""

    def value_of(self, name: str) -> Any:
        return {"wheels": None, "brakes": True, "ground": "ice", "chains": False}[name]


def test_a_row_is_an_attribute_of_a_job_and_of_a_model() -> None:
    assert (Vehicle().wheels, Vehicle().brakes, Model().wheels, Model().brakes) == (4.0, None, None, True)
    assert list(rows_of(Table)) == ["wheels", "brakes", "ground", "chains"]
    assert rows_of(Table)["brakes"] is Table.brakes
    with pytest.raises(AttributeError):
        Vehicle().hovers  # type: ignore[attr-defined]  # noqa: B018


def test_neutral_values_and_those_without_a_flag_are_the_default_unless_the_row_has_others() -> None:
    assert (Table.wheels.neutral, Table.chains.neutral, Table.brakes.neutral) == (None, False, None)
    assert (Table.wheels.value_without_flag, Table.brakes.value_without_flag, Table.ground.value_without_flag) == (
        None,
        True,
        "sand",
    )
    assert Table.ground.values.default is REQUIRED


def test_the_releases_of_a_row() -> None:
    assert Table.wheels.releases == list(KNOWN)
    assert Table.ground.releases == [Version(0, 12), Version(0, 13), Version(0, 14)]
    assert Argument(TEXT.optional, is_parsed=False).releases == []


@pytest.mark.parametrize(
    ("condition", "found", "holds"),
    [(WITH_WHEELS, 4, True), (WITH_WHEELS, 0, False), (WITH_WHEELS, None, False), (ON_ICE, "ice", True),
     (ON_ICE, "snow", False), (Condition("brakes", False), False, True), (Condition("brakes", False), None, False)],
)  # fmt: skip
def test_when_a_condition_holds(condition: Condition, found: object, holds: bool) -> None:
    assert condition.holds({condition.argument: found}.get) is holds


def test_which_flags_apply_and_how_they_are_spelled() -> None:
    flags = {name: row.flag for name, row in rows_of(Table).items() if row.flag}
    assert {name for name, flag in flags.items() if flag.applies(lambda name: name == "wheels")} == {
        "wheels",
        "brakes",
        "chains",
    }
    assert {name for name, flag in flags.items() if flag.applies(lambda name: None)} == {"wheels", "ground", "chains"}
    assert [flag.spelling(name) for name, flag in flags.items()] == [
        "--wheels", "--no-brakes", "--ground", "--with-chains",
    ]  # fmt: skip


def test_fields_of_megatron_bridge() -> None:
    assert [field.only_with for field in Table.chains.bridge] == [ON_ICE, WITH_WHEELS]
    found = [(field.section, field.name, field.is_written) for field in (*reads("ddp", "ddp.bucket_size"), *SAME)]
    assert found == [("ddp", "", False), ("ddp", "bucket_size", False), ("model", "", True)]
