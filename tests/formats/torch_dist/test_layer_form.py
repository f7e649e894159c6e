"""Test `--argument moe_layer_freq=...` of conversions to torch_dist: each layer by itself, or stacked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext import TorchDist, convert, open_checkpoint
from mcore_ckpt_ext.errors import UsageError
from tests.harness.checkpoints import fixture_named

LISTED, DEFAULT = "moe_layer_freq=([1]*4)", "moe_layer_freq=1"


def keys_of(run: Path) -> list[str]:
    index = open_checkpoint(run).files.index()
    assert index is not None
    return [key for key in [*index.arrays, *index.objects] if "decoder.layers." in key]


def test_layers_are_stored_as_the_reading_job_asks_for_them(tmp_path: Path) -> None:
    source = open_checkpoint(fixture_named("p09").run)
    listed = convert(source.files.folder, tmp_path / "listed", TorchDist(arguments=[LISTED]))
    assert any("stored as with moe_layer_freq [1,1,1,1]" in note for note in listed.notes)
    convert(tmp_path / "listed", tmp_path / "stacked", TorchDist(arguments=[DEFAULT]))
    assert all(key.split("decoder.layers.")[1][0].isdecimal() for key in keys_of(tmp_path / "listed"))
    assert not any(key.split("decoder.layers.")[1][0].isdecimal() for key in keys_of(tmp_path / "stacked"))
    for name, frequency in (("listed", [1, 1, 1, 1]), ("stacked", 1)):
        written = open_checkpoint(tmp_path / name)
        assert written.job.arguments().moe_layer_freq == frequency
        for kind in source.kinds():
            assert set(written.names(kind)) == set(source.names(kind))
            for tensor in source.names(kind):
                assert torch.equal(written.tensor(kind, tensor).read(), source.tensor(kind, tensor).read())


def test_arguments_of_another_model_are_refused(tmp_path: Path) -> None:
    source = fixture_named("p09").run
    with pytest.raises(UsageError, match="another model") as refused:
        convert(source, tmp_path / "other", TorchDist(arguments=["moe_layer_freq=[0,1,1,1]"]))
    assert "experts in layer 1, 2, 3" in str(refused.value)
    for invalid in ("banana", "[1]*3"):
        with pytest.raises(UsageError, match="invalid moe_layer_freq for 4 layers") as refused:
            convert(source, tmp_path / "other", TorchDist(arguments=[f"moe_layer_freq={invalid}"]))
        assert "another copy" not in str(refused.value)
    with pytest.raises(UsageError, match="only arguments that decide"):
        TorchDist(arguments=["num_layers=4"])
