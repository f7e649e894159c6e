"""Adapters of genuine Megatron-Bridge: resumed elsewhere, and loaded onto the model by genuine peft."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from megatron_on_cpu.dump_optimizer import assemble

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.offline.comparison import compare
from mcore_ckpt_ext.offline.conversion import convert
from mcore_ckpt_ext.offline.inspection import inspect
from mcore_ckpt_ext.offline.verification import verify
from mcore_ckpt_ext.targets import HuggingFace, Legacy, TorchDist
from tests.harness.jobs import RANK_SCRIPTS, differing
from tests.harness.packages import installed_beside
from tests.harness.programs import Programs

BRIDGE, PEFT, ACCELERATE = os.environ.get("BRIDGE_VERSION", "0.6.2"), "0.21.2", "1.15.0"
KINDS = ("lora", "dora", "canonical")
# Megatron-Bridge orders the rows of some by the tensor parallel size (model_space/adapters.py).
MOVES = {"lora": (1, 4), "dora": (2, 2), "canonical": (2, 2)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """Adapters of each kind, saved without their model under TP2 x PP1, and resumed elsewhere."""
    packages = installed_beside("megatron-bridge", BRIDGE, "--only-binary=:all:")
    script, found = RANK_SCRIPTS / "bridge_loop.py", Programs(tmp_path_factory.mktemp("adapters"))
    for kind in KINDS:
        run = found.place(kind) / "run"
        found.add(kind, script, packages, 2, 1, "none", run, kind)
        found.add(f"{kind}, resumed", script, packages, *MOVES[kind], run, "none", kind)
    found.add("canonical, TP1", script, packages, 1, 2, found.place("canonical") / "run", "none", "canonical")
    found.run()
    return found


def adapters(dump: Path) -> dict[str, torch.Tensor]:
    """Weights, masters and moments of the adapters alone: the model beside them is another one under each layout."""
    found = {name: tensor for name, tensor in assemble(dump).items() if ".adapter." in name}
    assert {name.partition(".")[0] for name in found} == {"weight", "fp32_param", "exp_avg", "exp_avg_sq"}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_resumed_with_their_optimizer(ran: Programs, kind: str) -> None:
    assert differing(adapters(ran.dump(kind)), adapters(ran.dump(f"{kind}, resumed"))) == []


def test_what_bridge_would_hand_out_wrongly_is_refused(ran: Programs) -> None:
    (ended,) = ran.ended["canonical, TP1"]
    assert "Megatron-Bridge reads the rows of these adapters wrongly under another tensor parallel size" in ended


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_them_onto_the_model(
    ran: Programs, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the model answers as Megatron's does, in fp32, to the rounding of sums."""
    monkeypatch.syspath_prepend(str(installed_beside("accelerate", ACCELERATE)))
    monkeypatch.syspath_prepend(str(installed_beside("peft", PEFT)))
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    place = ran.place(kind)
    assert inspect(place / "run").layout_text == "TP2 x PP1 x DP2"
    assert verify(place / "run").sound
    convert(place / "base", tmp_path / "base", HuggingFace(vocab_size=128), family="Llama")
    report = convert(place / "run", tmp_path / "adapters", HuggingFace(), family="Llama")
    assert report.notes[0] == "adapters for a Llama, which peft loads onto the model"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    tokens = torch.arange(12).view(1, -1)
    truth = torch.load(place / "answer.pt")
    with torch.no_grad():
        without = model(tokens).logits
        found = PeftModel.from_pretrained(model, tmp_path / "adapters").eval()(tokens).logits
    scale = float(truth.abs().max())
    assert float((without - truth).abs().max()) > 1e-2 * scale
    assert float((found - truth).abs().max()) < 1e-5 * scale


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_converted_is_equal_and_says_where_it_may_go(ran: Programs, kind: str, tmp_path: Path) -> None:
    report = convert(ran.place(kind) / "run", tmp_path / "run", TorchDist(loop="bridge"))
    assert compare(ran.place(kind) / "run", tmp_path / "run").equal
    told = any("resume under TP2 only: Megatron-Bridge reads the rows" in note for note in report.notes)
    assert told == (kind != "lora")


def test_what_is_not_written_is_refused_by_name(ran: Programs, tmp_path: Path) -> None:
    run = ran.place("lora") / "run"
    with pytest.raises(CheckpointError, match="adapters are not written as legacy"):
        convert(run, tmp_path / "legacy", Legacy(tensor_model_parallel_size=2))
    with pytest.raises(CheckpointError, match="--dtype has no meaning for adapters"):
        convert(run, tmp_path / "hf", HuggingFace(dtype="float16"), family="Llama")
