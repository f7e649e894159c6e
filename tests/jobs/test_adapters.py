"""Test adapters of genuine Megatron-Bridge: resumed under other layouts, and loaded by genuine peft."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_on_cpu.dump_optimizer import assemble

from mcore_ckpt_ext import HuggingFace, Legacy, TorchDist
from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.verification import verify
from tests.harness.adapters import adapters
from tests.harness.huggingface import assert_same_tensors, tensors
from tests.harness.jobs import RANK_SCRIPTS, differing
from tests.harness.packages import ACCELERATE, PEFT, installed_beside
from tests.harness.programs import Programs

pytestmark = pytest.mark.nightly

BRIDGE = os.environ.get("BRIDGE_VERSION", "0.6.2")
KINDS, VOCABULARY = ("lora", "dora", "canonical"), 128
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
    run, base, there, back = (found.place("canonical") / name for name in ("run", "base", "there", "back"))
    to_peft = ("convert", run, there, "--to", "hf", "--family", "Llama")
    to_bridge = ("convert", there, back, "--to", "torch_dist", "--for", "bridge", "--weights", base)
    commands = [to_peft, (*to_bridge, "--family", "Llama")]
    found.add("from peft", script, packages, 1, 2, back, "none", "canonical", commands=commands)
    found.add("canonical, TP1", script, packages, 1, 2, found.place("canonical") / "run", "none", "canonical")
    found.run()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_resumed_with_their_optimizer(ran: Programs, kind: str) -> None:
    assert differing(adapters(ran.dump(kind)), adapters(ran.dump(f"{kind}, resumed"))) == []


def test_adapters_that_bridge_reads_wrongly_are_refused(ran: Programs) -> None:
    (ended,) = ran.ended["canonical, TP1"]
    assert "Megatron-Bridge reads the rows of these adapters wrongly under another tensor parallel size" in ended


@pytest.fixture
def with_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on peft can be imported."""
    monkeypatch.syspath_prepend(str(installed_beside("accelerate", ACCELERATE)))
    monkeypatch.syspath_prepend(str(installed_beside("peft", PEFT)))


@pytest.fixture(scope="module")
def exported(ran: Programs) -> Path:
    """Of each kind, the model's folder for transformers, and that of its adapters for peft."""
    for kind in KINDS:
        place, folder = ran.place(kind), ran.folder / "exported" / kind
        convert(place / "base", folder / "base", HuggingFace(vocab_size=VOCABULARY), family="Llama")
        report = convert(place / "run", folder / "adapters", HuggingFace(), family="Llama")
        assert report.notes[0] == "adapters for a Llama, which peft loads onto the model"
    return ran.folder / "exported"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("with_peft")
def test_peft_loads_them_onto_the_model(ran: Programs, exported: Path, kind: str) -> None:
    """And the model answers as Megatron's does, in fp32, to the rounding of sums."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    place, folder = ran.place(kind), exported / kind
    assert inspect(place / "run").layout_text == "TP2 x PP1 x DP2"
    assert verify(place / "run").sound
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    tokens = torch.arange(12).view(1, -1)
    truth = torch.load(place / "answer.pt")
    with torch.no_grad():
        without = model(tokens).logits
        found = PeftModel.from_pretrained(model, folder / "adapters").eval()(tokens).logits
    scale = float(truth.abs().max())
    assert float((without - truth).abs().max()) > 1e-2 * scale
    assert float((found - truth).abs().max()) < 1e-5 * scale


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "bfloat16") for kind in KINDS), ("dora", "float32")])
@pytest.mark.usefixtures("with_peft")
def test_merged_they_are_what_peft_merges(ran: Programs, exported: Path, kind: str, dtype: str, tmp_path: Path) -> None:
    """Into a folder of Hugging Face's in the same bits; in fp32, which nothing rounds, to the order of sums."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    place, folder = ran.place(kind), exported / kind
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=getattr(torch, dtype))
    truth = PeftModel.from_pretrained(model, folder / "adapters").merge_and_unload().state_dict()
    base = tensors(folder / "base")
    assert sum(not torch.equal(base[name], truth[name].to(base[name].dtype)) for name in base) in (20, 28)
    chosen: Any = None if dtype == "bfloat16" else dtype
    report = convert(place / "run", tmp_path / "merged", HuggingFace(dtype=chosen), merge=folder / "base")
    assert any(note.startswith("adapters are merged into") for note in report.notes)
    assert "optimizer state exp_avg" in {item.key for item in report.unread}
    found = tensors(tmp_path / "merged")
    assert found.keys() == truth.keys()
    bound = 0 if dtype == "bfloat16" else 1e-6
    assert all(float((found[name] - truth[name]).abs().max()) <= bound for name in found)


@pytest.mark.parametrize("kind", KINDS)
def test_megatron_s_own_base_is_merged_into_too(ran: Programs, exported: Path, kind: str, tmp_path: Path) -> None:
    """And written for Hugging Face or for Megatron, it is the same model."""
    place = ran.place(kind)
    convert(place / "run", tmp_path / "one", HuggingFace(), merge=exported / kind / "base")
    convert(place / "run", tmp_path / "megatron", TorchDist(), merge=place / "base", family="Llama")
    convert(tmp_path / "megatron", tmp_path / "other", HuggingFace(vocab_size=VOCABULARY), family="Llama")
    assert_same_tensors(tmp_path / "one", tmp_path / "other")
    if kind == "lora":  # the two lie in one checkpoint
        options = HuggingFace(vocab_size=VOCABULARY, lora_alpha=8)
        convert(place / "whole", tmp_path / "beside", options, merge=place / "whole", family="Llama")
        assert_same_tensors(tmp_path / "one", tmp_path / "beside")


def test_mismatched_adapters_and_models_are_refused(ran: Programs, exported: Path, tmp_path: Path) -> None:
    run, base = ran.place("lora") / "run", exported / "lora" / "base"
    whole, plain = ran.place("lora") / "whole", ran.place("lora") / "base"
    cases: list[tuple[Path, Path, Any, str]] = [
        (plain, base, HuggingFace(), "no adapters to merge"),
        (whole, plain, HuggingFace(lora_alpha=8), "the adapters are stored with their own model"),
        (run, whole, HuggingFace(), "the model to merge into has adapters of its own"),
        (run, base, TorchDist(), "--merge writes a Hugging Face folder if it merges into one"),
    ]
    for source, into, target, said in cases:
        with pytest.raises(CheckpointError, match=said):
            convert(source, tmp_path / "refused", target, merge=into, family="Llama")
    with pytest.raises(CheckpointError, match="a merged model has no optimizer"):
        convert(run, tmp_path / "refused", HuggingFace(), merge=base, drop=["optimizer"])


def test_bridge_loads_what_was_peft_s(ran: Programs) -> None:
    live = {name: value for name, value in assemble(ran.dump("from peft")).items() if ".adapter." in name}
    weights = {name.removeprefix("weight."): value for name, value in live.items() if name.startswith("weight.")}
    own = open_checkpoint(ran.place("canonical") / "back")
    assert weights.keys() == set(own.names(WEIGHT))
    assert all(torch.equal(value, own.tensor(WEIGHT, name).read()) for name, value in weights.items())


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_the_folder_is_the_same(ran: Programs, exported: Path, kind: str, tmp_path: Path) -> None:
    there, base = exported / kind / "adapters", exported / kind / "base"
    report = convert(there, tmp_path / "run", TorchDist(loop="bridge"), weights=base)
    assert any("adapters for the Llama that was named" in note for note in report.notes)
    made, saved = open_checkpoint(tmp_path / "run"), open_checkpoint(ran.place(kind) / "run")
    assert set(made.names(WEIGHT)) == set(saved.names(WEIGHT))
    if kind == "lora":  # rows of which do not depend on the tensor parallel size
        pairs = ((made.tensor(WEIGHT, name).read(), saved.tensor(WEIGHT, name).read()) for name in made.names(WEIGHT))
        assert all(torch.equal(one, other) for one, other in pairs)
    convert(tmp_path / "run", tmp_path / "back", HuggingFace(), family="Llama")
    assert_same_tensors(there, tmp_path / "back")
    assert (there / "adapter_config.json").read_text() == (tmp_path / "back" / "adapter_config.json").read_text()
    for source in (there, tmp_path / "run"):
        convert(source, tmp_path / f"merged {source.name}", HuggingFace(), merge=base)
    assert_same_tensors(tmp_path / "merged adapters", tmp_path / "merged run")


@pytest.mark.parametrize("kind", KINDS)
def test_converted_adapters_are_equal_and_note_their_layouts(ran: Programs, kind: str, tmp_path: Path) -> None:
    report = convert(ran.place(kind) / "run", tmp_path / "run", TorchDist(loop="bridge"))
    assert compare(ran.place(kind) / "run", tmp_path / "run").equal
    told = any("resume under TP2 only: Megatron-Bridge reads the rows" in note for note in report.notes)
    assert told == (kind != "lora")


def test_unsupported_targets_are_refused_by_name(ran: Programs, tmp_path: Path) -> None:
    run = ran.place("lora") / "run"
    with pytest.raises(CheckpointError, match="adapters are not written as legacy"):
        convert(run, tmp_path / "legacy", Legacy(tensor_model_parallel_size=2))
    with pytest.raises(CheckpointError, match="--dtype has no meaning for adapters"):
        convert(run, tmp_path / "hf", HuggingFace(dtype="float16"), family="Llama")
