"""Test the output of `inspect` for real checkpoints against records of the jobs that wrote them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import mcore_ckpt_ext
from mcore_ckpt_ext.formats.parts import Job
from mcore_ckpt_ext.job.releases import FIRST_ARGUMENTS
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.rank_grid import RankGrid
from mcore_ckpt_ext.layout.sidecar import Sidecar
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations import resumptions
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.inspection_result import Inspection
from tests.harness.checkpoints import CORRUPTED, INTACT, Fixture, fixture_named

# A page, a script or a colleague's program may rely on these: a change is a new number in `inspection.SCHEMA`.
SCHEMA = {
    "schema", "path", "format", "iteration", "layout", "layout_text", "writer", "optimizer_format", "optimizer",
    "model", "training", "bytes_on_disk", "bytes_by_kind", "files", "silent_ranks", "why_silent", "resumptions",
    "sidecar", "sidecar_problem", "tensors", "buffers", "stages", "account", "described_by", "unbelieved", "data",
}  # fmt: skip
FILE_SCHEMA = {
    "file", "rank", "writer", "place", "bytes_on_disk", "records", "bytes_by_kind", "tensors",
}  # fmt: skip


@pytest.fixture(params=[*INTACT, *CORRUPTED])
def any_fixture(request: pytest.FixtureRequest) -> Fixture:
    return fixture_named(request.param)


def test_the_writer_is_recognized(any_fixture: Fixture) -> None:
    found = inspect(any_fixture.run)
    major, minor = (
        any_fixture.job["megatron_version"].removeprefix("core_v").removeprefix("megatron-core ").split(".")[:2]
    )
    assert found.writer.version == f"{major}.{minor}", found.writer.evidence
    assert found.iteration == any_fixture.job["iteration"]
    assert found.optimizer_format == any_fixture.job["sharding_type"]
    assert found.layout["world"] == any_fixture.job["world_size"]


def test_bytes_are_those_of_the_tensors(any_fixture: Fixture) -> None:
    """Without copies and padding: exactly the truth's; else at least that. On disk: what the file system says."""
    found = inspect(any_fixture.run)
    truth: dict[str, int] = defaultdict(int)
    for key, tensor in any_fixture.truth.items():
        truth[key.partition(".")[0]] += tensor.nbytes
    exact = "fully" in any_fixture.folder.name or "fsms" in any_fixture.folder.name
    for kind, size in truth.items():
        assert found.bytes_by_kind[kind] == size if exact else found.bytes_by_kind[kind] >= size, kind
    files = [path for path in any_fixture.iteration.rglob("*") if path.is_file()]
    assert found.bytes_on_disk == sum(path.stat().st_size for path in files)
    assert set(found.bytes_by_kind) - {"other"} == set(truth)
    assert found.model["parameters"] == sum(t.numel() for key, t in any_fixture.truth.items() if key.startswith(WEIGHT))


def test_the_schema_is_stable(any_fixture: Fixture) -> None:
    document = json.loads(json.dumps(asdict(inspect(any_fixture.run, buffers=True))))
    assert set(document) == SCHEMA
    assert document["schema"] == 8
    assert all(set(file) == FILE_SCHEMA for file in document["files"])
    assert {type(value) for value in document["model"].values()} <= {int, float, str}


def test_the_maps_of_gradient_buffers_are_those_that_the_content_confirms(any_fixture: Fixture) -> None:
    """From metadata alone, and yet where every parameter really lies."""
    found = inspect(any_fixture.run, buffers=True)
    if "reshardable" in (found.optimizer_format or "") and found.optimizer_format != "dp_reshardable":
        assert found.buffers == ()
        return
    checkpoint = mcore_ckpt_ext.open_checkpoint(any_fixture.run)
    if found.optimizer_format not in ("fully_sharded_model_space", "legacy_torch_per_parameter"):
        optimizer = checkpoint.optimizer.state()
        for group in optimizer.groups.values():  # type: ignore[attr-defined]
            for bucket, placements in optimizer.packing_of(group).packing.items():  # type: ignore[attr-defined]
                (mapped,) = (m for m in found.buffers if (m.group, m.buffer) == (str(group), str(bucket)))
                assert mapped.parameters == tuple((p.name, p.start, p.stop) for p in placements)


@pytest.mark.parametrize("name", ["p01", "p04", "p08", "p08c"])
def test_nothing_but_metadata_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever locates a tensor's elements is about to read them."""
    from mcore_ckpt_ext.transfer import Transfer

    monkeypatch.setattr(Transfer, "locate", lambda *_: pytest.fail("a tensor is read"))
    inspect(fixture_named(name).run, buffers=True)


def test_every_file_is_explained() -> None:
    found = inspect(fixture_named("p06").run)
    by_name = {file.file: file for file in found.files}
    assert by_name["__2_1.distcp"].rank == 2
    assert by_name["__2_1.distcp"].writer == 1
    assert by_name["__2_1.distcp"].place == "pipeline 1, data 0"
    assert found.silent_ranks == (1, 3, 5, 7)
    assert "without --ckpt-fully-parallel-save only data-parallel rank 0 writes" in found.why_silent
    legacy = {file.file: file.place for file in inspect(fixture_named("p08").run).files}
    assert legacy["mp_rank_01_000/model_optim_rng.pt"] == "tensor 1, pipeline 0"


def test_places_of_ranks_are_those_of_the_job(any_fixture: Fixture) -> None:
    found = mcore_ckpt_ext.open_checkpoint(any_fixture.run).job.layout
    for rank in any_fixture.job.get("ranks", ()):  # p08c: two ranks, not recorded
        where = rank["coords"]
        expected = (where["tp"], where.get("cp", 0), where["dp"], where["pp"])
        assert RankGrid(found).coordinates(rank["rank"]) == expected


def test_ranks_with_pipeline_before_data() -> None:
    layout = ParallelLayout(
        tensor=2, pipeline=3, virtual_pipeline=1, expert=1, expert_tensor=2, context=1, data=2, world=12
    )
    assert RankGrid(layout).coordinates(4) == (0, 0, 0, 1)
    assert RankGrid(layout, pipeline_first=True).coordinates(4) == (0, 0, 0, 2)


def resumed(found: Inspection) -> dict[tuple[str, str], str]:
    return {(item.who.partition(" ")[0], item.layouts.partition(":")[0]): item.versions for item in found.resumptions}


@pytest.mark.parametrize(
    ("name", "own", "other"),
    [("p01", "0.16 to 0.19", None), ("p04", None, "0.16 to 0.19"), ("p05", None, "0.14 to 0.15"),
     ("p06", "0.8 to 0.19", None), ("p07", "0.7 to 0.12", None), ("p08b", "0.16 to 0.19", None),
     ("p08c", "0.16 to 0.19", None), ("p10", "0.19", None),
     ("p31", "0.7 to 0.12", None), ("p33", None, "0.14 to 0.15")],
)  # fmt: skip
def test_who_can_resume_it(name: str, own: str | None, other: str | None) -> None:
    found = resumed(inspect(fixture_named(name).run))
    assert found.get(("stock", "its own")) == own
    assert found.get(("stock", "any")) == other
    assert found["Megatron", "any"] == "0.16 to 0.19"


def test_an_earlier_release_than_the_writer() -> None:
    """`tests/jobs/test_checkouts.py` resumes p10 in 0.16.1; other optimizers were not tried."""
    distributed, whole = (inspect(fixture_named(name).run).resumptions[-1] for name in ("p10", "p41"))
    assert (distributed.versions, whole.versions) == ("0.16 to 0.19", "0.19")
    assert distributed.note.startswith("before 0.19 with new random states")
    assert whole.note.startswith("tested with")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("p01", "0.15 to 0.18"), ("p04", "0.15 to 0.18"), ("p05", "0.11 to 0.12"), ("p06", "0.7 to 0.10"),
     ("p07", "0.7 to 0.12"), ("p10", "0.19"), ("p21", "0.19"), ("p31", "0.7 to 0.11")],
)  # fmt: skip
def test_files_alone_narrow_the_version(name: str, expected: str) -> None:
    """Without the arguments, which a launcher may rewrite."""
    checkpoint = mcore_ckpt_ext.open_checkpoint(fixture_named(name).run)
    checkpoint.job.common()["args"].__dict__.clear()
    writer = resumptions.writer_of(checkpoint)
    assert writer.version == expected
    without = "content metadata" in {item.what.removeprefix("no ") for item in writer.evidence}
    assert without == (name in ("p05", "p06", "p07", "p31"))


def test_a_map_that_the_chunks_contradict_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local spec first, for a checkpoint of Transformer Engine's: its borders are not those of the chunks."""
    run = fixture_named("p21").run
    orders = mcore_ckpt_ext.open_checkpoint(run).job.orders()
    monkeypatch.setattr(Job, "orders", lambda self: orders[::-1])
    found = inspect(run, buffers=True)
    assert all(item.order_source.startswith("the Transformer Engine layer spec") for item in found.buffers)


def test_a_sidecar_records_the_exact_version(damaged: Fixture) -> None:
    sidecar = Sidecar("mcore_ckpt_ext 0.1.0", "0.16.1", 4, {}, ())
    (damaged.iteration / "mcore_ckpt_ext.json").write_text(sidecar.to_json())
    assert inspect(damaged.run).writer.version == "0.16.1"


@pytest.mark.parametrize("name", ["p10", "p50"])
def test_a_later_release_resumes_what_it_wrote(name: str, tmp_path: Path) -> None:
    copy = fixture_named(name).copy_to(tmp_path / name)
    (copy.iteration / "mcore_ckpt_ext.json").write_text(Sidecar("test", "0.20.0", 4, {}, ()).to_json())
    releases = {found.versions for found in inspect(copy.run).resumptions} - {"none"}
    assert releases and all(found.endswith(" to 0.20") for found in releases)


@pytest.mark.parametrize(
    "target",
    [mcore_ckpt_ext.TorchDist(megatron_version="0.19.2"), mcore_ckpt_ext.TorchDist(megatron_version="0.13"),
     mcore_ckpt_ext.Legacy(megatron_version="0.16.1")],
    ids=str,
)  # fmt: skip
def test_converted_checkpoints_name_their_writer(target: mcore_ckpt_ext.targets.Target, tmp_path: Path) -> None:
    """Its arguments are those of the job that wrote the source, and prove nothing about who wrote the files."""
    mcore_ckpt_ext.convert(fixture_named("p01").run, tmp_path / "out", target)
    version = target.megatron_version.removesuffix(".1").removesuffix(".2")
    found = inspect(tmp_path / "out")
    assert found.writer.version == f"mcore-ckpt convert, for Megatron {version}"
    assert [(item.first, item.last) for item in found.writer.evidence] == [(version, version)]


def test_contradicting_evidence_is_not_explained_away(damaged: Fixture) -> None:
    """The common state of 0.19 beside files of 0.16."""

    def written_by(without: Iterable[str]) -> str:
        found = mcore_ckpt_ext.open_checkpoint(damaged.run)
        for name in without:
            vars(found.job.common()["args"]).pop(name, None)
        return resumptions.writer_of(found).version

    assert written_by(["tiktoken_pattern"]) == "0.16", "one argument that a fork took out decides nothing"
    assert "contradicts itself" in written_by(FIRST_ARGUMENTS)


def test_a_missing_file_is_reported(damaged: Fixture) -> None:
    (damaged.iteration / "__3_0.distcp").unlink()
    (missing,) = (file for file in inspect(damaged.run).files if file.bytes_on_disk is None)
    assert missing.file == "__3_0.distcp"


def test_a_canonical_folder(tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "c", mcore_ckpt_ext.Canonical())
    found = inspect(tmp_path / "c")
    assert (found.format, found.writer.version) == ("canonical", "mcore-ckpt convert, of a checkpoint of Megatron 0.16")
    assert {tensor.kind for tensor in found.tensors} == {"weight", "fp32_param", "exp_avg", "exp_avg_sq"}


def test_a_loss_scale_is_no_state_of_an_optimizer(tmp_path: Path) -> None:
    """fp16 keeps its scale as a tensor beside the optimizer's state; before the first step there are masters alone."""
    fixture = fixture_named("p08c").copy_to(tmp_path / "copy")
    for file in fixture.iteration.rglob("model_optim_rng.pt"):
        file.chmod(0o644)
        state = torch.load(file, weights_only=False)
        state["optimizer"]["grad_scaler"] = {"scale": torch.tensor([4096.0])}
        state["optimizer"]["optimizer"]["state"] = {}
        torch.save(state, file)
    found = inspect(fixture.run)
    assert found.optimizer == "masters alone"
    assert found.bytes_by_kind["other"] >= 4
