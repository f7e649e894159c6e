"""Tests the export of jobs with MTP layers in their arguments, when the folder gets none."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.families.recognition import fit
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.model_arguments import complete
from tests.harness.damage import without_digests
from tests.harness.huggingface import assert_same_tensors, make

MTP = {"mtp_num_layers": 1, "mtp_use_repeated_layer": True}
FIRST_NORM = "mtp.layers.0.enorm.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a model of the harness once."""

    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        make(name, folder)
        return folder

    return made


def job_with(model: Path, folder: Path, arguments: dict[str, Any]) -> Path:
    """Convert a model to the format whose arguments are JSON, and change them."""
    mcore_ckpt_ext.convert(model, folder, mcore_ckpt_ext.Canonical())
    text = (folder / "common.json").read_text()
    assert text.count('"mtp_num_layers": null') == 1
    added = ", ".join(f'"{name}": {json.dumps(value)}' for name, value in arguments.items())
    (without_digests(folder) / "common.json").write_text(text.replace('"mtp_num_layers": null', added))
    return folder


def kept_note(notes: tuple[str, ...]) -> list[str]:
    return [note for note in notes if "the folder holds no such layers" in note]


@pytest.mark.parametrize(("name", "key"), [
    ("llama", ""), ("nemotron_h", "num_nextn_predict_layers"), ("deepseek_v3", "num_nextn_predict_layers"),
])  # fmt: skip
def test_mtp_layers_that_are_not_there(name: str, key: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    """The arguments have them and the tensors do not; a published key that stays is reported."""
    job = job_with(model(name), tmp_path / "job", MTP)
    published = json.loads((model(name) / "config.json").read_text()) | ({key: 1} if key else {})
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text(json.dumps(published))
    target = mcore_ckpt_ext.HuggingFace(tokenizer=str(tmp_path / "published"))
    report = mcore_ckpt_ext.convert(job, tmp_path / "back", target)
    assert_same_tensors(model(name), tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config.get(key) == (1 if key else None)
    assert len(kept_note(report.notes)) == bool(key)


def test_repeated_mtp_layers_that_a_family_leaves_out(model: Callable[[str], Path]) -> None:
    """Llama has no MTP layers and leaves them out; DeepSeek-V3 would write them, and cannot say that they repeat."""
    for name, reasons in (("llama", []), ("deepseek_v3", ["mtp_use_repeated_layer is True, for which it has no key"])):
        source = open_checkpoint(model(name)).model
        described = source.fit()
        arguments = complete(JobArguments.of({**described.arguments.as_dict(), **MTP}))
        assert fit(described.family, arguments, [*source.weights().names(), FIRST_NORM]).reasons == reasons


def test_several_layers_of_a_family_that_has_at_most_one(model: Callable[[str], Path], tmp_path: Path) -> None:
    """Several MTP layers are refused where they are converted."""
    job = job_with(model("qwen3_next"), tmp_path / "job", {"mtp_num_layers": 2})
    mcore_ckpt_ext.convert(job, tmp_path / "back", mcore_ckpt_ext.HuggingFace(), family="Qwen3Next")
    described = open_checkpoint(model("qwen3_next")).model.fit()
    found = fit(described.family, described.arguments.replace(mtp_num_layers=2), [FIRST_NORM])
    assert found.reasons == ["mtp_num_layers is more than 1"]
