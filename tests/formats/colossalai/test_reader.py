"""Tests ColossalAI's sharded folders, written with torch like its Booster; real ones are in tests/colossalai."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext import HuggingFace, TorchDist, convert, inspect, open_checkpoint
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.operations.verification import verify
from tests.harness.colossalai_folders import MOMENTS_AND_MASTERS, colossalai_checkpoint
from tests.harness.damage import flip
from tests.harness.huggingface import make, tensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return colossalai_checkpoint(tmp_path_factory.mktemp("colossalai"))


def test_every_key_is_named_and_every_weight_carried(saved: Path, tmp_path: Path) -> None:
    found = inspect(saved)
    assert found.format == "colossalai"
    assert found.writer.version == "no Megatron: ColossalAI's Booster wrote it"
    numel = found.model["parameters"]
    assert found.bytes_by_kind["weight"] == found.bytes_by_kind["exp_avg"] == 4 * int(numel)
    assert {file.file for file in found.files} == {
        *(f"modeling/pytorch_model-0000{number}.bin" for number in (1, 2)),
        *(f"optimizer/pytorch_optim-0000{number}.bin" for number in (1, 2)),
    }
    report = convert(saved, tmp_path / "hf", HuggingFace())
    parameters = len(list((make("gpt2", tmp_path / "again")).parameters()))
    keys = {item.key for item in report.unread}
    assert {
        f"{kind} of parameter {number}" for kind in (*MOMENTS_AND_MASTERS, "step") for number in range(parameters)
    } < keys
    assert "optimizer/pytorch_optim_group.bin" in keys
    ours, theirs = tensors(tmp_path / "hf"), tensors(saved.parent / "source")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_optimizer_that_the_target_cannot_hold_ends_the_conversion_unless_it_is_dropped(
    saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="exp_avg of parameter 0"):
        convert(saved, tmp_path / "out", TorchDist())
    with pytest.raises(UnsupportedCheckpointError, match="fp32_param of parameter"):
        convert(saved, tmp_path / "out", TorchDist(), drop=["exp_avg", "exp_avg_sq", "step", "unknown"])
    assert (
        inspect(saved).resumptions[0].note
        == "convert it first: mcore-ckpt convert SRC DST --to torch_dist --drop optimizer"
    )
    convert(saved, tmp_path / "out", TorchDist(), drop=["optimizer"])
    assert open_checkpoint(tmp_path / "out").optimizer.format() is None


def test_a_terminal_gets_a_line_for_keys_that_differ_in_numbers(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A large model has thousands of such keys; the report lists each, the terminal counts them."""
    report = convert(saved, tmp_path / "report", TorchDist(), drop=["optimizer"])
    assert main(["convert", str(saved), str(tmp_path / "out"), "--to", "torch_dist", "--drop", "optimizer"]) == 0
    lines = [text for text in capsys.readouterr().out.splitlines() if text.startswith("left out: ")]
    assert len(lines) == len(MOMENTS_AND_MASTERS) + len(("step", "groups"))
    counted = sum(int(match[1]) + 1 if (match := re.search(r" and (\d+) similar keys", text)) else 1 for text in lines)
    assert counted == len(report.unread)


def test_both_in_one_folder(tmp_path: Path) -> None:
    one = colossalai_checkpoint(tmp_path, weights=".", optimizer=".")
    assert inspect(one).format == "colossalai"
    assert verify(one).sound
    # Folders with weights only are recognized by the names of their shards.
    for file in one.glob("pytorch_optim*"):
        file.unlink()
    assert open_checkpoint(one).format.name == "colossalai"
    assert open_checkpoint(one).files.unread() == []
    assert open_checkpoint(tmp_path / "source").format.name == "hf"


def test_damage_is_found(tmp_path: Path) -> None:
    saved = colossalai_checkpoint(tmp_path)
    assert verify(saved).sound
    shard = saved / "optimizer" / "pytorch_optim-00001.bin"
    content = shard.read_bytes()
    flip(shard, content.index(torch.full((8,), 2.0).numpy().tobytes()))
    damaged = verify(saved)
    assert not damaged.sound
    assert "pytorch_optim-00001.bin" in damaged.findings[0].where
    shard.write_bytes(content)
    states = torch.load(shard, weights_only=True)
    torch.save({key: states[key] for key in list(states)[1:]}, shard)
    with pytest.raises(UnreadableCheckpointError, match="another save") as refused:
        inspect(saved)
    assert "no parameter 0" in str(refused.value)
    shard.unlink()
    with pytest.raises(UnreadableCheckpointError, match="do not exist"):
        open_checkpoint(saved)
    assert not verify(saved).sound


def test_a_remote_folder_is_listed_as_a_local_one(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    remote = f"memory://{uuid.uuid4()}/saved"
    fsspec.filesystem("memory").put(str(saved), remote, recursive=True)
    listed = []
    for folder in (saved, remote):
        assert main(["inspect", str(folder), "--json"]) == 0
        listed.append({**json.loads(capsys.readouterr().out), "path": ""})
    assert listed[0] == listed[1]
