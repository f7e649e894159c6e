"""Test an optimizer format of a future release: one module, one row about releases, one line in the table."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext import TorchDist, compare, convert, inspect, open_checkpoint, verify
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.optimizers import table
from tests.harness.checkpoints import assert_is_the_truth, fixture_named, make_writable
from tests.optimizers.imagined_format import ENCODINGS, GLOBAL_TENSORS


@pytest.fixture(scope="module")
def imagined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the imagined release: `fully_reshardable` of 0.16 under other keys, and labeled as such."""
    fixture, folder = fixture_named("p04"), tmp_path_factory.mktemp("imagined") / "iter_0000004"
    shutil.copytree(fixture.iteration, folder)
    make_writable(folder)
    index = folder / ".metadata"
    metadata = pickle.loads(index.read_bytes())

    def renamed(key: str) -> str:
        return key.replace("optimizer.state.", "optimizer.tensors.", 1)

    metadata.state_dict_metadata = {renamed(key): entry for key, entry in metadata.state_dict_metadata.items()}
    metadata.storage_data = {replace(at, fqn=renamed(at.fqn)): place for at, place in metadata.storage_data.items()}
    index.write_bytes(pickle.dumps(metadata))
    common = torch.load(folder / "common.pt", weights_only=False)
    common["optimizer"]["param_state_sharding_type"] = GLOBAL_TENSORS
    torch.save(common, folder / "common.pt")
    return folder


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line in the table."""
    monkeypatch.setattr(table, "ENCODINGS", (*table.ENCODINGS, *ENCODINGS))


def test_without_the_line_it_is_refused_by_its_label(imagined: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=GLOBAL_TENSORS):
        open_checkpoint(imagined).names("exp_avg")


@pytest.mark.usefixtures("known")
def test_it_is_read_verified_and_converted(imagined: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(imagined)
    assert checkpoint.optimizer.format() == GLOBAL_TENSORS
    assert_is_the_truth(checkpoint, fixture_named("p04"))
    assert verify(imagined).sound
    convert(imagined, tmp_path / "out", TorchDist(megatron_version="0.19"))
    assert compare(fixture_named("p04").run, tmp_path / "out").equal


@pytest.mark.usefixtures("known")
def test_who_resumes_it_follows_from_the_row_about_releases(imagined: Path) -> None:
    stock = next(one for one in inspect(imagined).resumptions if one.who == "stock Megatron")
    assert stock.layouts == "none"
    assert not table.stock_can_load(GLOBAL_TENSORS, False, (0, 20))
    assert table.stock_can_load(GLOBAL_TENSORS, True, (0, 21))
