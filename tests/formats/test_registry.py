"""Tests the recognition of formats, and that the list of formats is complete."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext import formats
from mcore_ckpt_ext.formats import registry
from mcore_ckpt_ext.formats.registry import FORMATS, format_of, is_adapter_folder
from tests.harness.checkpoints import fixture_named
from tests.harness.ranks.own_format import Own, own_format


def test_every_folder_of_a_format_is_listed() -> None:
    listed = {one.reader_class.__module__.rsplit(".", 2)[1] for one in FORMATS}
    assert listed == {path.parent.name for path in Path(formats.__path__[0]).glob("*/reader.py")}
    assert len({one.name for one in FORMATS}) == len(FORMATS)


def test_formats_with_options_have_a_writer() -> None:
    """Writers are named by text, which no type checker sees."""
    for one in FORMATS:
        assert (one.target is None) == (one.writer == ""), one.name
        module, _, name = one.writer.partition(":")
        assert not module or callable(getattr(import_module(module), name)), one.name


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


def test_a_folder_that_is_not_there_is_in_no_format(tmp_path: Path) -> None:
    assert format_of(tmp_path / "iter_0000004") is None
    assert not is_adapter_folder(tmp_path / "adapters")


@pytest.mark.parametrize("content", ["", "{", '{"sharded_backend": "tensorstore"}'])
def test_a_folder_in_no_known_format_is_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(content)
    assert format_of(tmp_path) is None
    with pytest.raises(mcore_ckpt_ext.CheckpointError, match=r"metadata\.json|tensorstore"):
        mcore_ckpt_ext.open_checkpoint(tmp_path)


def test_a_further_format_is_a_row_of_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The format can be written, opened, verified, compared and converted back without other changes."""
    monkeypatch.setattr(registry, "FORMATS", (own_format(Own.__module__), *FORMATS))
    run = fixture_named("p01").run
    mcore_ckpt_ext.convert(run, tmp_path / "own", Own())
    assert mcore_ckpt_ext.open_checkpoint(tmp_path / "own").format.name == "own"
    assert mcore_ckpt_ext.verify(tmp_path / "own").sound
    mcore_ckpt_ext.convert(tmp_path / "own", tmp_path / "back", mcore_ckpt_ext.TorchDist())
    assert mcore_ckpt_ext.compare(run, tmp_path / "back").equal
