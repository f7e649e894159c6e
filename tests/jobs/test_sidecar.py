"""Test the sidecar that genuine Megatron-LM 0.19.2 saves with its checkpoints, and its use when reading."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import assemble

from mcore_ckpt_ext import open_checkpoint, verify
from mcore_ckpt_ext.job import releases
from mcore_ckpt_ext.job.releases import Capability
from mcore_ckpt_ext.operations.inspection import inspect
from tests.harness.cases import Case, Outcomes, load_all
from tests.harness.checkouts import release_of
from tests.harness.jobs import OFF, Job, copy_of, differing, resume, train_and_save
from tests.harness.layouts import Layout
from tests.harness.models import LLAMA

pytestmark = pytest.mark.nightly

NAME = "mcore_ckpt_ext.json"


def sidecar_of(job: Job) -> dict[str, Any]:
    return json.loads((job.iteration / NAME).read_text())


@pytest.fixture(params=["gpt", "llama"])
def saved(request: pytest.FixtureRequest) -> Job:
    """Saved asynchronously, with tied embeddings on two stages; and synchronously, with tensor-parallel siblings."""
    return request.getfixturevalue(request.param)


def test_it_names_the_job(saved: Job) -> None:
    sidecar = sidecar_of(saved)
    assert sidecar["written_by"].startswith("mcore_ckpt_ext ")
    assert (sidecar["megatron"], sidecar["iteration"]) == (metadata.version("megatron-core"), 4)
    layout = sidecar["layout"]
    assert (layout["tensor"], layout["pipeline"]) == (saved.layout.tensor, saved.layout.pipeline)
    assert (layout["data"], layout["world"]) == (2, saved.layout.ranks)


def test_it_says_what_the_live_gradient_buffers_say(saved: Job) -> None:
    """Every group of ranks is there, each bucket with every parameter at the elements that its gradient occupies."""
    groups = sidecar_of(saved)["groups"]
    recorded = {index: group["buckets"] for group in groups for index in group["indices"]}
    live = [json.loads(path.read_text()) for path in sorted(saved.buffers.glob("rank_*.json"))]
    assert len(live) == saved.layout.tensor * saved.layout.pipeline
    assert sorted(recorded) == sorted(group["index"] for group in live)
    for group in live:
        found = [
            {
                "buffer": bucket["buffer"],
                "bucket": bucket["bucket"],
                "numel": bucket["numel"],
                "parameters": [[item["name"], item["start"], item["stop"]] for item in bucket["parameters"]],
            }
            for bucket in recorded[group["index"]]
        ]
        assert found == group["buckets"]


def test_nothing_half_written_is_left(saved: Job) -> None:
    assert [path.name for path in saved.iteration.glob("mcore_ckpt_ext*")] == [NAME]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sidecar")


@pytest.fixture(scope="module")
def outcomes(folder: Path, gpt: Job) -> Outcomes:
    """The same checkpoint with its sidecar, without, and with sidecars that cannot be believed; as TP2 x PP1."""
    runs = {name: copy_of(gpt.run, folder / name) for name in ("intact", "deleted", "lying", "garbage")}
    sidecars = {name: run / "iter_0000004" / NAME for name, run in runs.items()}
    sidecars["deleted"].unlink()
    sidecars["garbage"].write_text("[" + sidecars["intact"].read_text()[:1000])
    lying = sidecars["lying"].read_text()
    one, other = (f"decoder.layers.{layer}.self_attention.linear_proj.weight" for layer in (1, 2))
    lying = lying.replace(one, "?").replace(other, one).replace("?", other)
    sidecars["lying"].write_text(lying)
    cases = [Case(name, run, dump=folder / f"{name}-dump") for name, run in runs.items()]
    return load_all(folder / "job", Layout(2, 1, 2), cases, are_rehearsed=True)


def witness_of(outcomes: Outcomes, name: str) -> str:
    (line,) = outcomes[name][0]["lines"]
    return line.partition("placed by ")[2].partition(")")[0]


def test_without_it_the_release_is_recognized(outcomes: Outcomes, folder: Path) -> None:
    """By the arguments that the installed release really stores."""
    assert outcomes["deleted"]
    checkpoint = open_checkpoint(folder / "deleted")
    release = release_of(checkout=False)
    assert inspect(folder / "deleted").writer.version == f"{release.major}.{release.minor}"
    for row in (row for row in vars(releases).values() if isinstance(row, Capability) and row.shown_by):
        assert row.is_shown_by(checkpoint.job.arguments()) == row.is_of(release), row.what


def test_it_is_used_first(outcomes: Outcomes) -> None:
    assert witness_of(outcomes, "intact") == "the sidecar"


@pytest.mark.parametrize("name", ["deleted", "garbage"])
def test_without_it_the_layout_is_recovered(name: str, outcomes: Outcomes) -> None:
    assert "sidecar" not in witness_of(outcomes, name)
    (line,) = outcomes[name][0]["lines"]
    assert ("mcore_ckpt_ext.json is ignored: " in line) == (name == "garbage")


def test_it_is_not_used_without_verification(outcomes: Outcomes) -> None:
    """Two parameters of equal shape are exchanged in it."""
    assert "instead of the sidecar" in witness_of(outcomes, "lying")


@pytest.mark.parametrize("name", ["intact", "deleted", "lying", "garbage"])
def test_the_result_is_the_same(name: str, outcomes: Outcomes, gpt: Job, folder: Path) -> None:
    assert outcomes[name][0]["error"] is None
    assert differing(assemble(gpt.at_save), assemble(folder / f"{name}-dump")) == []


def test_it_has_no_digests_where_masters_are_whole(saved: Job) -> None:
    assert sidecar_of(saved)["digests"] == []


def test_one_of_an_iteration_that_stock_overwrote_is_stale(tmp_path: Path) -> None:
    """Of remainders nothing but digests shows where they lie; those of the earlier save are not held against them."""
    more = [*LLAMA, "--use-precision-aware-optimizer"]
    options = {"plugins": [launch.PRECISION_AWARE], "more": more}
    train_and_save(tmp_path, Layout(1, 2, 2), **options)
    again = train_and_save(
        tmp_path, Layout(1, 2, 2), plugins=options["plugins"], more=[*more, "--seed", "4321"], environment=OFF
    )
    assert sidecar_of(again)["index"]
    found = verify(again.run)
    assert found.sound
    assert ["it is stale" in finding.what for finding in found.findings if finding.where.endswith(NAME)] == [True]
    resumed = resume(tmp_path / "resumed", Layout(2, 1, 2), again.run, **options)
    assert "mcore_ckpt_ext.json is ignored: it is stale" in resumed.output
    assert "joined from their weights and remainders" in resumed.output
    expected, loaded = assemble(again.at_save), assemble(resumed.at_load)
    state = [name for name in expected if not name.startswith("weight.")]
    assert differing({name: expected[name] for name in state}, {name: loaded[name] for name in state}) == []
