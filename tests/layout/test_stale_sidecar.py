"""Test that a stale sidecar is reported, and is not used anywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext import open_checkpoint, verify
from mcore_ckpt_ext.errors import PackingError
from mcore_ckpt_ext.formats.sidecar_file import find_sidecar
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.additive_digest import format_digest
from mcore_ckpt_ext.layout.sidecar import FILE_NAME, Sidecar
from mcore_ckpt_ext.megatron import decision_phases
from mcore_ckpt_ext.megatron.decision_phases import PARAMETER_ORDER, AssessedResume
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.saving.atomic_write import Disk
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE, FolderIndex, SharedIndex, read_index_digest
from tests.harness.checkpoints import Fixture, everything_in, fixture_named
from tests.harness.damage import recorded_digests
from tests.harness.jobs import differing

LAYOUT = {"tensor": 1, "pipeline": 2, "virtual_pipeline": 1, "expert": 1, "expert_tensor": 1, "context": 1, "data": 2}


@pytest.fixture
def remainders(tmp_path: Path) -> Fixture:
    """Masters as remainders, whose order chunk borders leave no doubt of; with the sidecar of its own save."""
    fixture = fixture_named("p47").copy_to(tmp_path / "copy")
    sidecar = Sidecar("mcore_ckpt_ext 1.0.0", "0.19.0", 4, LAYOUT, (), None, recorded_digests(fixture))
    Disk().publish(fixture.iteration, sidecar.to_json(), None, "")
    return fixture


def edit(fixture: Fixture, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((fixture.iteration / FILE_NAME).read_text())
    change(content)
    (fixture.iteration / FILE_NAME).write_text(json.dumps(content))


def of_another_save(content: dict[str, Any]) -> None:
    """As earlier releases wrote it, of a save under the same layout."""
    del content["index"]
    for group in content["digests"]:
        for number, kinds in enumerate(group["parameters"].values()):
            kinds["param_remainder"] = format_digest(number)


STALE = {
    "another index": (
        lambda content: content.update(index="0" * 32),
        "it is stale, of a save that wrote another index",
    ),
    "another iteration": (lambda content: content.update(iteration=8), "it is stale, of iteration 8 and not 4"),
    "another layout": (
        lambda content: content["layout"].update(tensor=2, data=1),
        "it is stale, of another layout (tensor 2 and not 1, data 1 and not 2)",
    ),
    "other digests": (of_another_save, "it is stale: none of its digests matches the stored state"),
}


def test_a_published_sidecar_is_bound_to_its_index(remainders: Fixture) -> None:
    assert json.loads((remainders.iteration / FILE_NAME).read_text())["index"] == read_index_digest(
        remainders.iteration
    )
    checkpoint = open_checkpoint(remainders.run)
    assert checkpoint.job.found_sidecar().sidecar is not None
    assert checkpoint.job.found_sidecar().problem is None
    found = verify(remainders.run)
    assert found.sound
    assert "optimizer digests" in [check.name for check in found.checks]


def test_the_index_may_be_handed_over_without_its_plans(remainders: Fixture) -> None:
    data = (remainders.iteration / METADATA_FILE).read_bytes()
    handed = SharedIndex(remainders.iteration, data).without_plans()
    assert find_sidecar(FolderIndex(remainders.iteration, handed)).sidecar is not None
    handed = SharedIndex(remainders.iteration, data + b"x")
    assert find_sidecar(FolderIndex(remainders.iteration, handed)).sidecar is None


@pytest.mark.parametrize("way", STALE)
def test_a_stale_sidecar_is_reported_and_ignored(way: str, remainders: Fixture, tmp_path: Path) -> None:
    """The checkpoint is intact, and says so."""
    change, why = STALE[way]
    edit(remainders, change)
    found = verify(remainders.run)
    assert found.sound
    warnings = [finding for finding in found.findings if finding.where.endswith(FILE_NAME)]
    assert warnings
    assert all(finding.severity == "warning" and why in finding.what for finding in warnings)
    assert "optimizer digests" not in [check.name for check in found.checks]
    checkpoint = open_checkpoint(remainders.run)
    assert differing(remainders.truth, everything_in(checkpoint)) == []
    assert any(
        f"{FILE_NAME} is ignored: " in notice and why in notice for notice in checkpoint.format.notices(checkpoint)
    )


def test_an_unknown_order_is_no_damage(remainders: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the user's own may lie in any order: without their sidecar no one knows it, and nothing is wrong."""
    edit(remainders, STALE["another index"][0])
    monkeypatch.setattr(JobArguments, "of", with_own_modules(JobArguments.of))
    found = verify(remainders.run)
    assert found.sound
    assert any("places of the parameters are not certain" in finding.what for finding in found.findings)
    assert [check.done for check in found.checks if "not certain" in check.extent] != []
    assert not any(check.done for check in found.checks if "not certain" in check.extent)
    with pytest.raises(PackingError, match="expected: a sidecar, or chunk borders"):
        open_checkpoint(remainders.run).names("fp32_param")


def with_own_modules(original: Callable[..., JobArguments]) -> Callable[..., JobArguments]:
    """Arguments of a job with `--spec`."""
    return lambda stated, **others: original({**stated, "spec": ["my.spec", "layers"]}, **others)


def test_damage_is_not_mistaken_for_a_stale_sidecar(remainders: Fixture) -> None:
    """Where the index is that of the save, digests that differ show damage, however many they are."""
    edit(remainders, lambda content: of_another_save({"index": "", **content}))
    assert not verify(remainders.run).sound


def test_a_live_order_is_not_compared_with_a_stale_one(remainders: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_phases, "order_digests", lambda groups: "its order")
    reading, _ = PARAMETER_ORDER
    assert reading.work(AssessedResume(LoadSession(remainders.iteration), JobArguments.of({}))) == "its order"
    edit(remainders, lambda content: content.update(index="0" * 32))
    assert not reading.work(AssessedResume(LoadSession(remainders.iteration), JobArguments.of({})))


def test_an_index_that_is_gone_binds_nothing(tmp_path: Path, remainders: Fixture) -> None:
    """As in a folder without one, of zarr."""
    shutil.copy(remainders.iteration / FILE_NAME, tmp_path / FILE_NAME)
    content = json.loads((tmp_path / FILE_NAME).read_text())
    del content["index"]
    (tmp_path / FILE_NAME).write_text(json.dumps(content))
    assert find_sidecar(FolderIndex(tmp_path)).sidecar is not None
    Disk().publish(tmp_path, json.dumps(content), None, "")
    assert find_sidecar(FolderIndex(tmp_path)).sidecar is not None
