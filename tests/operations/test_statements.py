"""Test that each statement of `inspect` is true for the job that saved, and absent without a job."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext import Canonical, FsdpDtensor, HuggingFace, Legacy, TorchDist
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.megatron.policy import CHECKS
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.inspection_result import Inspection
from mcore_ckpt_ext.operations.layout_plan import plan
from mcore_ckpt_ext.optimizers import stock_failures
from mcore_ckpt_ext.optimizers.stock_failures import StockFailure
from mcore_ckpt_ext.targets import Target
from tests.harness.checkpoints import CORRUPTED, FIXTURES, Fixture, fixture_named
from tests.harness.colossalai_folders import colossalai_checkpoint
from tests.harness.huggingface import make
from tests.harness.peft import adapter, peft_folder

DIMENSIONS = {"TP": "tp", "PP": "pp", "VPP": "vpp", "EP": "ep", "ETP": "etp", "CP": "cp", "DP": "dp"}
SIZES = {
    "layers": "--num-layers", "hidden size": "--hidden-size", "feed-forward size": "--ffn-hidden-size",
    "attention heads": "--num-attention-heads", "query groups": "--num-query-groups", "experts": "--num-experts",
    "experts per token": "--moe-router-topk", "sequence length": "--seq-length",
}  # fmt: skip
NO_JOB = dict.fromkeys((*DIMENSIONS, "world"))


def argument(fixture: Fixture, flag: str) -> str | None:
    """The value of a flag of the job's command line, of which the last counts; None where it was not given."""
    words = fixture.job.get("argv", ())
    values = [value for name, value in zip(words, words[1:], strict=False) if name == flag]
    return str(values[-1]) if values else None


def check_model(found: Inspection, fixture: Fixture) -> None:
    if "argv" not in fixture.job:  # its arguments are the witness
        assert found.model["layers"] == fixture.job["args"]["num_layers"]
        return
    stated = {label: argument(fixture, flag) for label, flag in SIZES.items() if label in found.model}
    known = {label: int(value) for label, value in stated.items() if value is not None}
    assert {label: found.model[label] for label in known} == known
    assert stated.keys() - known.keys() <= {"feed-forward size", "experts per token"}, "Megatron's defaults"
    untied = "--untie-embeddings-and-output-weights" in fixture.job["argv"]
    assert found.model["embeddings"] == ("untied" if untied else "tied")
    if "layer spec" in found.model and not found.described_by:  # else run_config.yaml states it, of another job
        assert found.model["layer spec"] == argument(fixture, "--transformer-impl")


def check_job(found: Inspection, fixture: Fixture) -> None:
    """Check what is of the job, whether its checkpoint was converted or not."""
    assert found.iteration == fixture.job["iteration"]
    assert found.training.get("step", found.iteration) == found.iteration
    if samples := fixture.job.get("consumed_train_samples"):
        assert found.training.get("consumed_train_samples", samples) == samples


@pytest.mark.parametrize("name", [*FIXTURES, *CORRUPTED])
def test_of_a_job(name: str) -> None:
    fixture = fixture_named(name)
    found, layout = inspect(fixture.run), fixture.job["layout"]
    check_job(found, fixture)
    check_model(found, fixture)
    stated = {label: layout.get(key) or 1 for label, key in DIMENSIONS.items() if key in layout}
    assert {label: found.layout[label] or size for label, size in stated.items()} == stated
    assert found.layout["world"] in (fixture.job["world_size"], None)
    assert not found.writer.converted
    assert all(file.rank is None or file.rank < fixture.job["world_size"] for file in found.files)


CONVERSIONS: dict[str, tuple[Callable[[], Target], dict[str, int], str]] = {
    "torch_dist": (TorchDist, {"TP": 2, "PP": 2, "DP": 2}, "for Megatron 0.19"),
    "bridge": (lambda: TorchDist(loop="bridge"), {"TP": 2, "PP": 2}, "for Megatron-Bridge on Megatron 0.19"),
    "legacy": (lambda: Legacy(tensor_model_parallel_size=4), {"TP": 4, "PP": 2}, "for Megatron 0.19"),
    "fsdp_dtensor": (FsdpDtensor, {"TP": 2, "PP": 1}, "for Megatron 0.19"),
    "canonical": (Canonical, {"TP": 2, "PP": 2, "DP": 2}, "of a checkpoint of Megatron 0.16"),
}


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_of_a_conversion(kind: str, tmp_path: Path) -> None:
    target, layout, whom = CONVERSIONS[kind]
    fixture = fixture_named("p02")
    report = mcore_ckpt_ext.convert(fixture.run, tmp_path / "out", target())
    assert not any("unknown" in note or "not known" in note for note in report.notes)
    found = inspect(tmp_path / "out")
    check_job(found, fixture)
    check_model(found, fixture)
    assert {label: found.layout[label] for label in layout} == layout
    assert (found.writer.converted, found.writer.version) == (True, f"mcore-ckpt convert, {whom}")
    assert {file.rank for file in found.files} == {None}, "no rank wrote these files"
    assert (found.silent_ranks, found.why_silent) == ((), "")
    page = (Path(__file__).parents[2] / "docs" / "reference" / "loops.md").read_text()
    for resumption in found.resumptions:
        if resumption.who == "Megatron-Bridge with mcore_ckpt_ext":
            assert f"megatron-bridge {resumption.note.removeprefix('tested with ')} on Core" in page


def check_no_job(found: Inspection) -> None:
    assert (found.iteration, found.layout, found.layout_text) == (None, NO_JOB, "")
    assert (found.training, found.stages, found.optimizer_format) == ({}, (), None)
    assert {file.rank for file in found.files} == {None}


@pytest.mark.parametrize(
    ("target", "version"),
    [(TorchDist, "mcore-ckpt convert, for Megatron 0.19"), (Canonical, "mcore-ckpt convert"),
     (HuggingFace, "no Megatron: it is a Hugging Face folder"),
     (lambda: TorchDist(loop="bridge"), "mcore-ckpt convert, for Megatron-Bridge on Megatron 0.19")],
)  # fmt: skip
def test_of_a_conversion_of_a_model(target: Callable[[], Target], version: str, tmp_path: Path) -> None:
    make("llama", tmp_path / "model")
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "out", target())
    found = inspect(tmp_path / "out")
    check_no_job(found)
    assert found.writer.version == version
    again = mcore_ckpt_ext.convert(tmp_path / "out", tmp_path / "again", HuggingFace())
    assert not any("unknown" in note or "not known" in note for note in again.notes)


def test_of_a_hugging_face_folder(tmp_path: Path) -> None:
    make("llama", tmp_path / "model")
    found = inspect(tmp_path / "model")
    check_no_job(found)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (found.writer.version, found.writer.evidence) == ("no Megatron: it is a Hugging Face folder", ())
    assert found.model == {
        "parameters": found.model["parameters"], "layers": config["num_hidden_layers"],
        "hidden size": config["hidden_size"], "feed-forward size": config["intermediate_size"],
        "attention heads": config["num_attention_heads"], "query groups": config["num_key_value_heads"],
        "positions": config["max_position_embeddings"], "vocabulary": config["vocab_size"],
        "embeddings": "untied", "weights": "float32",
    }  # fmt: skip
    planned = plan(tmp_path / "model", 2)
    assert (planned.old_layout, planned.gpu_memory) == ("", None), "no job has run, so none has needed any memory"
    (resumption,) = found.resumptions
    assert (resumption.who, "--load FOLDER" in resumption.note) == ("Megatron with mcore_ckpt_ext", True)


def test_of_a_model_that_only_megatron_bridge_trains(tmp_path: Path) -> None:
    make("gemma2", tmp_path / "model")
    (resumption,) = inspect(tmp_path / "model").resumptions
    assert resumption.who == "not resumable as is"


def test_of_adapters(tmp_path: Path) -> None:
    make("llama", tmp_path / "model")
    folder = peft_folder(tmp_path / "adapters", adapter("model.layers.0.self_attn.q_proj", 32, 32))
    found = inspect(folder, weights=tmp_path / "model")
    check_no_job(found)
    assert (found.writer.version, found.writer.evidence) == ("no Megatron: it is a PEFT folder", ())
    (resumption,) = found.resumptions
    assert "--for bridge --weights MODEL" in resumption.note


def test_of_a_checkpoint_of_colossalai(tmp_path: Path) -> None:
    found = inspect(colossalai_checkpoint(tmp_path))
    check_no_job(found)
    assert found.optimizer == "Adam"
    assert "ColossalAI" in found.writer.version


def test_in_words_and_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("llama", tmp_path / "model")
    assert main(["inspect", str(tmp_path / "model"), "--html", str(tmp_path / "page.html")]) == 0
    out = capsys.readouterr().out
    assert out.count("none recorded") == 2, "layout and iteration"
    for word in ("TP1", "evidence", "training", "transformer_engine"):
        assert word not in out


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("p11", stock_failures.SHIFTED_PARAMETERS),
        ("p12", stock_failures.SETTINGS_OF_FUSED_ADAM),
        ("p45", stock_failures.CPU_OFFLOADING),
        ("p47b", stock_failures.REMAINDERS_AS_FP32),
    ],
)
def test_what_stock_megatron_does_is_what_a_job_explains(name: str, failure: StockFailure) -> None:
    """`inspect` names the row that the decision of a load names."""
    stock, *_ = inspect(fixture_named(name).run).resumptions
    assert (stock.who, stock.versions, stock.note) == ("stock Megatron", "none", failure.consequence)
    assert failure.name in [check.name for check in CHECKS]
    assert not any(planned.stock_resumes for planned in plan(fixture_named(name).run, 4).layouts)
