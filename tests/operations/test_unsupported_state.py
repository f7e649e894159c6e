"""Test that every command names unknown state, and that optimizer state is never lost silently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.storage.json_tree import encode
from tests.harness.checkpoints import FIXTURES, INTACT, Fixture, fixture_named
from tests.harness.damage import without_digests
from tests.harness.unknown_keys import LOST, OTHER, STRANGE, add_to_legacy, add_to_torch_dist, add_to_zarr

ADDING = {"torch_dist": add_to_torch_dist, "zarr": add_to_zarr, "torch": add_to_legacy}


# Of the formats of p50 and p51 see tests/formats.
READ = [name for name in FIXTURES if name[:3] not in ("p50", "p51")]


@pytest.fixture(params=READ)
def strange(request: pytest.FixtureRequest, tmp_path: Path) -> Fixture:
    """Each of the real checkpoints, with two tensors more than anybody knows."""
    copied = fixture_named(request.param).copy_to(tmp_path / "strange")
    ADDING[mcore_ckpt_ext.open_checkpoint(copied.run).format.name](copied.iteration)
    return copied


@pytest.mark.thorough
def test_unknown_keys_are_named(strange: Fixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = mcore_ckpt_ext.Canonical()
    with pytest.raises(UnsupportedCheckpointError, match=rf"would be lost; found: {LOST} \(\d.*--drop unknown;"):
        mcore_ckpt_ext.convert(strange.run, tmp_path / "out", target, accept_lost=True)
    assert not (tmp_path / "out").exists()
    kinds = [
        item.kind for item in mcore_ckpt_ext.open_checkpoint(strange.run).files.unread() if item.is_of_optimizer_state
    ]
    report = mcore_ckpt_ext.convert(strange.run, tmp_path / "out", target, accept_lost=True, drop=kinds, dry_run=True)
    named = {item.key.partition("/shard")[0]: item for item in report.unread if not item.why}
    assert named.keys() == {LOST, OTHER}
    assert all(item.nbytes >= STRANGE.nbytes for item in named.values())

    found = verify(strange.run, quick=True)
    assert found.sound
    unknown = {finding.where.partition("/shard")[0] for finding in found.findings if finding.check == "every key known"}
    assert unknown == {OTHER, LOST}

    same = compare(strange.run, strange.run, kinds=["weight"])
    assert same.equal  # who asks for weights is told of weights
    assert main(["diff", str(strange.run), str(strange.run)]) == 1
    told = capsys.readouterr().out
    assert told.count(": unknown key") >= 4
    assert LOST in told
    # Lost elements cannot be compared, not even with themselves.
    lost = mcore_ckpt_ext.open_checkpoint(strange.run).optimizer.state().lost_elements()
    assert told.splitlines()[-1].startswith("DIFFERENT" if lost else "NOT KNOWN TO BE EQUAL")


@pytest.mark.parametrize("name", INTACT)
def test_of_a_checkpoint_as_megatron_wrote_it_everything_is_known(name: str) -> None:
    unread = mcore_ckpt_ext.open_checkpoint(fixture_named(name).run).files.unread()
    assert {item.key for item in unread} <= {"rerun_state_machine", "rerun_state_machine_state"}
    assert all("belongs to the ranks" in item.why for item in unread)


def test_a_canonical_folder(tmp_path: Path) -> None:
    """What the common state of a source had too much is carried as it is, and named again."""
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "run", mcore_ckpt_ext.Canonical())
    about = json.loads((tmp_path / "run" / "common.json").read_text())
    about["common"] = encode({**mcore_ckpt_ext.open_checkpoint(tmp_path / "run").job.common(), OTHER: STRANGE})
    (without_digests(tmp_path / "run") / "common.json").write_text(json.dumps(about))
    for source, target in (("run", mcore_ckpt_ext.TorchDist()), ("out", mcore_ckpt_ext.Legacy())):
        destination = tmp_path / ("out" if source == "run" else "more")
        report = mcore_ckpt_ext.convert(tmp_path / source, destination, target)
        assert [(item.key, item.nbytes, item.carried) for item in report.unread] == [(OTHER, 12, True)]
        assert torch.equal(mcore_ckpt_ext.open_checkpoint(destination).job.common()[OTHER], STRANGE)


class TestDropping:
    def test_the_whole_optimizer(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for target in mcore_ckpt_ext.targets.TARGETS:
            words = ["--drop", "optimizer"] if target != "hf" else []
            assert main(["convert", str(fixture_named("p02").run), str(tmp_path / target), "--to", target, *words]) == 0
            assert "left out: optimizer state exp_avg, 2" in capsys.readouterr().out
            written = mcore_ckpt_ext.open_checkpoint(tmp_path / target)
            assert written.optimizer.format() is None
            assert compare(fixture_named("p02").run, tmp_path / target, kinds=["weight"]).equal or target == "hf"

    @pytest.mark.parametrize("kind", ["exp_avg", "momentum_buffer"])
    def test_drop_refuses_convertible_and_absent_state(self, kind: str, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=f"accepts only state that cannot be converted; found: --drop {kind}; exp"):
            mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "o", mcore_ckpt_ext.TorchDist(), drop=[kind])

    def test_hugging_face_has_no_optimizer_to_drop(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="has no optimizer"):
            mcore_ckpt_ext.convert(
                fixture_named("p02").run, tmp_path / "o", mcore_ckpt_ext.HuggingFace(), drop=["optimizer"]
            )


@pytest.mark.parametrize("target", [mcore_ckpt_ext.TorchDist(), mcore_ckpt_ext.Legacy()])
def test_an_optimizer_that_the_target_does_not_have(target: mcore_ckpt_ext.targets.Target, tmp_path: Path) -> None:
    """A second moment that some parameters lack, as in a chain of Muon and Adam: refused by name, kept by canonical."""
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "run", mcore_ckpt_ext.Canonical())
    name = "exp_avg_sq.decoder.layers.0.mlp.linear_fc1.weight"
    other = name.replace("exp_avg_sq", "momentum")
    (file,) = (tmp_path / "run").glob("*.safetensors")
    tensors = {other if key == name else key: tensor for key, tensor in load_file(file).items() if key != "checksums"}
    save_file(tensors, file)
    index = tmp_path / "run" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(f'"{name}"', f'"{other}"'))
    with pytest.raises(UnsupportedCheckpointError, match="cannot be written as.*momentum of 1 parameter.*--drop"):
        mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "out", target)
    assert not (tmp_path / "out").exists()
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "kept", mcore_ckpt_ext.Canonical())
    assert compare(tmp_path / "run", tmp_path / "kept").equal
