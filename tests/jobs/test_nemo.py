"""Test NeMo 2: its folder, written by genuine calls of Megatron Core and Fiddle with NeMo's order and names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mcore_ckpt_ext import Canonical, Legacy, TorchDist
from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.job.facts import Facts
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.verification import verify
from tests.harness.jobs import RANK_SCRIPTS, assert_same_optimizer
from tests.harness.packages import installed_beside
from tests.harness.programs import Programs

pytestmark = pytest.mark.nightly

PACKAGES = {"fiddle": "0.3.1", "libcst": "1.9.0", "absl-py": "2.5.1"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    packages = [installed_beside(name, version, "--only-binary=:all:") for name, version in PACKAGES.items()]
    found = Programs(tmp_path_factory.mktemp("nemo"))
    run = found.place("run")
    nemo = RANK_SCRIPTS / "nemo_loop.py"
    found.add("saved", nemo, 2, 2, run, "save", *packages)
    found.add("loaded", nemo, 1, 4, run, "load", *packages)
    found.add("loaded by stock", nemo, 1, 4, run, "load", *packages, stock=True)
    sixty = RANK_SCRIPTS / "sixty_lines.py"
    found.add("plain", sixty, 2, 2, "none", found.place("plain"), "together")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MCORE_CKPT_EXT_EXPLAIN", "1")
        found.run()
    found.dump("saved")
    return found


def test_decision_agrees_with_stock(ran: Programs) -> None:
    """Megatron Core reshards NeMo's optimizer format itself, here from TP2 x PP2 to TP1 x PP4."""
    (decided,) = ran.printed("loaded", "loads the optimizer", "fills the optimizer")
    assert "stock Megatron loads the optimizer" in decided
    for name in ("loaded", "loaded by stock"):
        assert_same_optimizer(ran.dump("saved"), ran.dump(name))


def test_description_of_the_job(ran: Programs) -> None:
    """By `model.yaml` and `io.json`; the index shows the rest, and what nothing shows is not known."""
    found = inspect(ran.place("run"))
    assert found.layout_text == "TP2 x PP2 (DP not known)"
    assert (found.described_by, found.unbelieved, found.iteration) == ("model.yaml", (), 4)
    stated = open_checkpoint(ran.place("run")).job.arguments()
    assert (stated.num_layers, stated.hidden_size, stated.whole("num_attention_heads")) == (4, 32, 4)
    assert (stated.use_distributed_optimizer, stated.bf16, str(stated.params_dtype)) == (True, True, "torch.bfloat16")
    assert verify(ran.place("run")).sound


def test_either_file_alone_is_used(ran: Programs, tmp_path: Path) -> None:
    for gone, source in (("io.json", "model.yaml"), ("model.yaml", "io.json")):
        copy = tmp_path / source
        shutil.copytree(ran.place("run"), copy)
        (copy / "context" / gone).unlink()
        found = inspect(copy)
        assert (found.described_by, found.unbelieved) == (source, ())
        assert found.layout_text.startswith("TP2 x PP2")
    shutil.rmtree(copy / "context")
    assert inspect(copy).layout_text == "not known"
    facts = Facts(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    convert(copy, tmp_path / "out", TorchDist(), facts=facts)
    assert compare(ran.place("run"), tmp_path / "out").equal


def test_it_is_converted(ran: Programs, tmp_path: Path) -> None:
    """To everything, by all that it holds; the names are Megatron's."""
    run = ran.place("run")
    report = convert(run, tmp_path / "torch_dist", TorchDist())
    assert report.proven_elements > 0
    assert not report.unread
    assert any(
        "as it belongs to Lightning: loops, lr_schedulers, pytorch-lightning_version" in note for note in report.notes
    )
    convert(run, tmp_path / "canonical", Canonical())
    convert(tmp_path / "torch_dist", tmp_path / "legacy", Legacy(tensor_model_parallel_size=1))
    for name in ("torch_dist", "canonical", "legacy"):
        assert verify(tmp_path / name).sound
        assert compare(run, tmp_path / name).equal, name
    plain = open_checkpoint(ran.place("plain"))
    for kind in ("weight", "exp_avg"):
        assert sorted(open_checkpoint(run).names(kind)) == sorted(plain.names(kind))


@pytest.mark.parametrize(("name", "text"), [
    ("io.json", "{}"),
    ("io.json", '{"objects": {"a": {"type": "ref", "key": "a"}}, "root": {"type": "ref", "key": "a"}}'),
    ("model.yaml", "config: 3"), ("model.yaml", "config: {num_layers: !!python/name:os.system x}"),
    ("model.yaml", "config: {num_layers: -1}"),
])  # fmt: skip
def test_a_context_that_is_none(ran: Programs, tmp_path: Path, name: str, text: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ran.place("run"), copy)
    (copy / "context" / name).write_text(text)
    found = inspect(copy)
    assert any(problem.startswith(f"{name} is ignored: ") for problem in found.unbelieved)
    assert found.layout["TP"] == 2


def test_a_folder_without_weights_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "weights").mkdir()
    with pytest.raises(UnreadableCheckpointError, match="no checkpoint in this folder"):
        open_checkpoint(tmp_path)
