"""Test that a source that changes during its conversion is noticed, whatever its modification times are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UnreadableCheckpointError
from tests.harness.checkpoints import fixture_named


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face folder."""
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "model", mcore_ckpt_ext.HuggingFace())
    return tmp_path / "model"


def in_place(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x01")


def replaced(file: Path) -> None:
    data = file.read_bytes()
    file.rename(file.with_name("old"))
    file.write_bytes(data[:-1] + b"\x01")
    file.with_name("old").unlink()


@pytest.mark.parametrize("change", [in_place, replaced])
def test_a_change_whose_time_was_set_back_is_noticed(
    change: Callable[[Path], None], model: Path, tmp_path: Path
) -> None:
    def edit(done: int, total: int) -> None:
        file = model / "config.json"
        times = file.stat().st_atime_ns, file.stat().st_mtime_ns
        change(file)
        os.utime(file, ns=times)

    with pytest.raises(UnreadableCheckpointError, match=r"changed while it was read(.|\n)*config\.json"):
        mcore_ckpt_ext.convert(model, tmp_path / "out", mcore_ckpt_ext.Canonical(), progress=edit)
    assert not (tmp_path / "out").exists()


def test_reading_is_no_change(model: Path, tmp_path: Path) -> None:
    def read(done: int, total: int) -> None:
        for file in model.iterdir():
            file.read_bytes()

    mcore_ckpt_ext.convert(model, tmp_path / "out", mcore_ckpt_ext.Canonical(), progress=read)


def test_code_that_a_small_file_names_is_reported(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_parrot.ParrotTokenizer", None]}})
    )
    for target in (mcore_ckpt_ext.TorchDist(), mcore_ckpt_ext.HuggingFace()):
        report = mcore_ckpt_ext.convert(model, tmp_path / target.name, target)
        (note,) = (note for note in report.notes if "auto_map" in note)
        assert "tokenizer_config.json names code" in note
        assert "tokenization_parrot.ParrotTokenizer" in note


def test_an_epsilon_of_zero_is_reported(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0}))
    report = mcore_ckpt_ext.convert(model, tmp_path / "out", mcore_ckpt_ext.TorchDist())
    assert any("epsilon of its norms is 0" in note for note in report.notes)


@pytest.mark.parametrize("name", ["a" * 250, "ä" * 127, "b" * 255])
def test_a_destination_with_a_long_name(name: str, tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / name, mcore_ckpt_ext.Canonical())
    assert os.listdir(tmp_path) == [name]  # noqa: PTH208
