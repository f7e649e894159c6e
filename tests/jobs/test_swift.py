"""Test ms-swift's genuine `save_mcore_checkpoint` and `load_mcore_checkpoint` (4.6.0), and mcore-bridge 1.2.2.

Both are from PyPI.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext import HuggingFace, TorchDist
from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.verification import verify
from tests.harness.adapters import adapters
from tests.harness.huggingface import assert_same_tensors, tensors
from tests.harness.jobs import RANK_SCRIPTS, assert_same_optimizer, differing
from tests.harness.packages import ACCELERATE, PEFT, installed_beside, with_transformer_engine
from tests.harness.programs import Programs

pytestmark = pytest.mark.nightly

_SWIFT = ".lora_"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    packages, script = installed_beside("ms-swift", "4.6.0", "--only-binary=:all:"), RANK_SCRIPTS / "swift_loop.py"
    bridge = installed_beside("mcore-bridge", "1.2.2", "--only-binary=:all:")
    lora = (bridge, installed_beside("peft", PEFT), installed_beside("accelerate", ACCELERATE))
    found = Programs(tmp_path_factory.mktemp("swift"))
    run, adapted = found.place("run"), found.place("lora") / "run"
    with pytest.MonkeyPatch.context() as patch:
        with_transformer_engine(patch)
        found.add("saved", script, packages, 1, 4, "none", run)
        found.add("stock refuses", script, packages, 2, 2, run, "none", stock=True)
        found.add("loaded", script, packages, 2, 2, run, "none")
        found.add("adapters", script, packages, 2, 1, "none", adapted, *lora)
        found.add("adapters, PP2", script, packages, 2, 2, adapted, "none", *lora)
        found.add("adapters, TP1", script, packages, 1, 2, adapted, "none", *lora)
        found.run()
        yield found


def test_it_resumes_under_another_layout(ran: Programs) -> None:
    (ended,) = ran.ended["stock refuses"]
    assert "(TP, PP) mismatch after resume ((2, 2) vs (1, 4) from checkpoint): not supported" in ended
    assert_same_optimizer(ran.dump("saved"), ran.dump("loaded"))


def test_its_arguments_are_not_taken_for_all_of_megatrons(ran: Programs) -> None:
    """They are under Megatron's names, but one that is missing says nothing of the version."""
    checkpoint = open_checkpoint(ran.place("run"))
    assert not checkpoint.job.arguments().is_complete
    assert str(checkpoint.job.layout) == "TP1 x PP4 x DP1"
    assert verify(checkpoint.files.folder).sound


def test_adapters_are_resumed_with_their_optimizer(ran: Programs) -> None:
    """Under another pipeline; under another tensor parallel size ms-swift itself would hand out the wrong rows."""
    assert differing(adapters(ran.dump("adapters"), _SWIFT), adapters(ran.dump("adapters, PP2"), _SWIFT)) == []
    (ended,) = ran.ended["adapters, TP1"]
    assert "ms-swift reads the rows of these adapters wrongly under another tensor parallel size" in ended


def test_merged_they_are_what_ms_swift_merges(ran: Programs, tmp_path: Path) -> None:
    """In fp32 to the order of sums; and by way of a PEFT folder in the same bits."""
    place, wide = ran.place("lora"), HuggingFace(vocab_size=128, dtype="float32")
    told = replace(wide, arguments=("rotary_base=10000",))
    with pytest.raises(CheckpointError, match="--argument rotary_base"):
        convert(place / "merged", tmp_path / "truth", wide, family="Llama")
    convert(place / "merged", tmp_path / "truth", told, family="Llama")
    convert(place / "run", tmp_path / "merged", told, merge=place / "base", family="Llama")
    truth, found = tensors(tmp_path / "truth"), tensors(tmp_path / "merged")
    assert found.keys() == truth.keys()
    assert all(torch.allclose(found[name], truth[name], rtol=1e-6, atol=1e-7) for name in truth)
    convert(place / "base", tmp_path / "base", told, family="Llama")
    assert sum(not torch.equal(tensor, truth[name]) for name, tensor in tensors(tmp_path / "base").items()) == 28
    convert(place / "run", tmp_path / "peft", HuggingFace(), weights=tmp_path / "base")
    convert(tmp_path / "peft", tmp_path / "by peft", wide, merge=tmp_path / "base")
    assert_same_tensors(tmp_path / "merged", tmp_path / "by peft")


def test_converted_they_are_ms_swift_s_and_say_where_they_may_go(ran: Programs, tmp_path: Path) -> None:
    run = ran.place("lora") / "run"
    report = convert(run, tmp_path / "run", TorchDist())
    assert compare(run, tmp_path / "run").equal
    assert any(note.startswith("resume under TP2 only: ms-swift reads the rows") for note in report.notes)
    with pytest.raises(CheckpointError, match="adapters of ms-swift are not written for Megatron-Bridge"):
        convert(run, tmp_path / "bridge", TorchDist(loop="bridge"))
