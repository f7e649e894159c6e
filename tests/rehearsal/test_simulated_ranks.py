"""Test that simulated ranks perform the phases of a job, and refuse what a job refuses."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_ckpt_ext.layout.sidecar import FILE_NAME, Sidecar
from mcore_ckpt_ext.megatron.live.phases import Phase
from mcore_ckpt_ext.megatron.load_phases import ALL_PHASES, MegatronResume
from mcore_ckpt_ext.optimizers import digests
from mcore_ckpt_ext.optimizers.remainders import split
from mcore_ckpt_ext.rehearsal import simulated_ranks
from mcore_ckpt_ext.rehearsal.rehearse import rehearse
from mcore_ckpt_ext.rehearsal.result import Rehearsal
from mcore_ckpt_ext.rehearsal.simulated_ranks import SimulatedRanks
from mcore_ckpt_ext.rehearsal.target import sizes_in
from tests.harness.checkpoints import Fixture, fixture_named
from tests.harness.damage import MATRIX, flip, recorded_digests, remove_schedule
from tests.harness.unknown_keys import LOST, OTHER, add_to_torch_dist


def rehearsed(fixture: Fixture, layout: str = "tp=2", gpus: int = 2) -> Rehearsal:
    return rehearse(fixture.run, gpus, sizes_in(layout), full=True)


def test_a_rehearsal_performs_every_phase_up_to_the_first_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    performed: list[Phase] = []
    original: Callable[[SimulatedRanks, Phase, MegatronResume], None] = SimulatedRanks._perform  # type: ignore[assignment]

    def perform(self: SimulatedRanks, phase: Phase, load: MegatronResume) -> None:
        performed.append(phase)
        original(self, phase, load)

    monkeypatch.setattr(SimulatedRanks, "_perform", perform)
    assert rehearsed(fixture_named("p10")).will_succeed
    expected = [phase for phase in ALL_PHASES if not phase.writes]
    left_out = [phase.name for phase in expected if phase not in performed]
    # No option asks for mismatches, local checkpoints, all checksums or to read once, the layout changes, and the
    # optimizer has weights.
    assert left_out == [
        "looking at the strictness",
        "looking for local checkpoints",
        "reading the recorded order of the parameters",
        "comparing the order of the parameters",
        "describing the live weights",
        "planning the resume",
        "planning what is read once",
    ]
    assert list(dict.fromkeys(performed)) == [phase for phase in expected if phase in performed]


@pytest.mark.parametrize(
    ("name", "phase", "says"),
    [
        ("p01", "looking at the progress of the run", "the checkpoint does not say how far its run was"),
        ("p10", "looking at the progress of the run", "the checkpoint does not say how far its run was"),
        ("p08b", "comparing the schedules", "the checkpoint has no state of the learning rate scheduler"),
        ("p50", "comparing the schedules", "the checkpoint has no state of the learning rate scheduler"),
    ],
)
def test_a_checkpoint_without_a_schedule_is_refused(name: str, phase: str, says: str, tmp_path: Path) -> None:
    """In a file, an archive, the files of ranks, or entries of the index."""
    copy = fixture_named(name).copy_to(tmp_path / "copy")
    remove_schedule(copy.iteration)
    found = rehearsed(copy)
    assert not found.will_succeed
    assert str(found.refusal).startswith(f"mcore_ckpt_ext refused while {phase}; the optimizer is unchanged")
    assert says in str(found.refusal)
    assert found.is_verbatim


def position_of_remainder(fixture: Fixture, name: str) -> tuple[Path, int]:
    """Return the file and the position of the first byte of a parameter's remainders."""
    data = split(fixture.truth[f"fp32_param.{name}"].flatten())[1].numpy().tobytes()[:256]
    places = [(path, path.read_bytes().find(data)) for path in fixture.iteration.glob("*.distcp")]
    return next((path, position) for path, position in places if position >= 0)


def test_a_remainder_that_differs_from_its_recorded_digest_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = fixture_named("p47").copy_to(tmp_path / "copy")
    sidecar = Sidecar("mcore_ckpt_ext 1.0.0", "0.19.0", 4, {}, (), None, recorded_digests(copy))
    (copy.iteration / FILE_NAME).write_text(sidecar.to_json())
    assert rehearsed(copy).will_succeed
    # Samples that choose between packings are small enough to miss the damage, as in a large checkpoint.
    monkeypatch.setattr(digests, "_ENOUGH", 64)
    flip(*position_of_remainder(copy, MATRIX), 1)
    found = rehearsed(copy)
    assert not found.will_succeed
    assert "remainders of masters have changed since they were saved" in str(found.refusal)


OVERRIDE = {"override_opt_param_scheduler": True}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("p10", {"decoupled_lr": 5e-4}, "max_lr 0.0005"),
        ("p10", {"decoupled_lr": 5e-4, **OVERRIDE}, None),
        ("p10", {"weight_decay": 0.05}, "another start weight decay, 0.05 instead of 0.01"),
        ("p10", {"weight_decay": 0.05, **OVERRIDE}, None),
        ("p10", {"weight_decay": 0.01}, None),
        ("p10", {"lr": 1.0}, "another learning rate"),
    ],
)
def test_other_parameter_groups_are_judged_as_the_job_judges_them(
    name: str, changes: dict[str, object], reason: str | None
) -> None:
    found = rehearse(fixture_named(name).run, 2, sizes_in("tp=2"), changes=changes)
    assert found.will_succeed == (reason is None), found.refusal
    assert reason is None or reason in str(found.refusal)


def test_a_key_that_nobody_knows_is_named(tmp_path: Path) -> None:
    copy = fixture_named("p10").copy_to(tmp_path / "copy")
    add_to_torch_dist(copy.iteration)
    found = rehearsed(copy)
    assert found.will_succeed
    assert f"not looked at: {LOST}, {OTHER}/shard_0_1" in found.given
    assert not any("not looked at" in line for line in rehearsed(fixture_named("p10")).given)


def test_a_rehearsal_checks_its_options_alone() -> None:
    """What a job checks is in a phase, which the simulated ranks perform."""
    names: dict[str, set[str]] = {}
    for path in Path(simulated_ranks.__file__).parent.glob("*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)]
        names[path.stem] = {node.id for node in nodes if node.id.lstrip("_").startswith("check_")}
    assert {module: checks for module, checks in names.items() if checks} == {
        "rehearse": {"check_changes", "check_gpus"},
        "target": {"_check_together", "check_layer_form", "check_schedule", "check_values"},
    }
