"""Which format a folder is in, and that no format is missing from the one list of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext import formats
from mcore_ckpt_ext.formats.registry import FORMATS, format_of
from tests.harness.checkpoints import fixture_named


def test_every_folder_of_a_format_is_listed() -> None:
    listed = {type(one).__module__.rsplit(".", 2)[1] for one in FORMATS}
    assert listed == {path.parent.name for path in Path(formats.__path__[0]).glob("*/reader.py")}
    assert len({one.name for one in FORMATS}) == len(FORMATS)


@pytest.mark.parametrize(("fixture", "name"), [("p01", "torch_dist"), ("p31", "zarr")])
def test_which_format_a_checkpoint_is_in(fixture: str, name: str) -> None:
    found = format_of(fixture_named(fixture).iteration)
    assert found is not None
    assert found.name == name


def model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def model_with_optimizer(folder: Path) -> None:
    model(folder)
    (folder / "pytorch_optim.bin.index.json").write_text("{}")


def adapters(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def canonical(folder: Path) -> None:
    for name in ("common.json", "model.safetensors.index.json"):
        (folder / name).write_text("{}")


def legacy(folder: Path) -> None:
    (folder / "mp_rank_00").mkdir()


def legacy_with_tokenizer(folder: Path) -> None:
    legacy(folder)
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (model, "hf"),
        (model_with_optimizer, "colossalai"),
        (adapters, "peft"),
        (canonical, "canonical"),
        (legacy, "legacy"),
        (legacy_with_tokenizer, "legacy"),
    ],
)
def test_the_more_particular_format_comes_first(make: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    make(tmp_path)
    found = format_of(tmp_path)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("content", ["", "{", '{"sharded_backend": "tensorstore"}'])
def test_a_folder_in_no_known_format_is_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(content)
    assert format_of(tmp_path) is None
    with pytest.raises(mcore_ckpt_ext.CheckpointError, match=r"metadata\.json|tensorstore"):
        mcore_ckpt_ext.open_checkpoint(tmp_path)
