"""Tests options of `--merge`: contradictions between options and adapters, and files of the base model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext import HuggingFace, TorchDist
from mcore_ckpt_ext.errors import CheckpointError, UsageError
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.targets import Target
from tests.harness.checkpoints import fixture_named
from tests.harness.peft import adapter, peft_folder

BRIDGE = TorchDist(loop="bridge")
LAYER = "model.layers.{}.self_attn.o_proj"


@pytest.fixture
def base(models: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of a Llama with its own tokens and tokenizer."""
    folder = Path(shutil.copytree(models["llama"], tmp_path / "base"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 11}')
    return folder


def test_tokens_and_tokenizer_are_those_of_the_base(base: Path, tmp_path: Path) -> None:
    lora = peft_folder(tmp_path / "peft", adapter(LAYER.format(0), 32, 32))
    report = convert(lora, tmp_path / "merged", HuggingFace(), merge=base)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["eos_token_id"] == 7
    assert json.loads((tmp_path / "merged" / "tokenizer_config.json").read_text()) == {"model_max_length": 11}
    assert not [note for note in report.notes if "--tokenizer" in note]


@pytest.mark.parametrize(
    ("source", "config", "target", "options", "said"),
    [
        ("base", {}, HuggingFace(), ["merge"], "the checkpoint has no adapters to merge"),
        ("peft", {}, HuggingFace(), ["merge", "weights"], "given twice.*leave --weights out"),
        ("peft", {}, HuggingFace(lora_alpha=64), ["merge"], "stores the alpha.*found: --lora-alpha 64.*alpha 5"),
        ("peft", {"lora_alpha": None}, BRIDGE, ["weights"], "set lora_alpha in adapter_config.json"),
    ],
)
def test_contradictory_values_are_refused(
    source: str, config: dict[str, Any], target: Target, options: list[str], said: str, base: Path, tmp_path: Path
) -> None:
    peft_folder(tmp_path / "peft", adapter(LAYER.format(0), 32, 32), **config)
    with pytest.raises(CheckpointError, match=said):
        convert(tmp_path / source, tmp_path / "out", target, **dict.fromkeys(options, base))
    assert not (tmp_path / "out").exists()


OF_CONFIG = "those of its config.json; found: --argument {};.*leave the option out"
OF_FORM = "torch_dist takes only arguments that decide how its layers are stored; found: {};"


@pytest.mark.parametrize("argument", ["rotary_base=500000", "swiglu=true", "num_layers=9"])
@pytest.mark.parametrize(
    ("target", "option", "said"),
    [
        (HuggingFace, "merge", OF_CONFIG),
        (TorchDist, "merge", OF_FORM),
        (partial(TorchDist, loop="bridge"), "weights", OF_FORM),
    ],
)
def test_arguments_of_a_model_with_a_config(
    argument: str, target: Callable[..., Target], option: str, said: str, base: Path, tmp_path: Path
) -> None:
    """Neither another value than that of config.json is taken, nor the same one in silence."""
    lora = peft_folder(tmp_path / "peft", adapter(LAYER.format(0), 32, 32))
    with pytest.raises(UsageError, match=said.format(argument.partition("=")[0])):
        convert(lora, tmp_path / "out", target(arguments=[argument]), **{option: base})
    assert not (tmp_path / "out").exists()


def test_arguments_of_a_model_of_megatron(tmp_path: Path) -> None:
    """A value that replaces the stored one is said; the stored layout is not replaced."""
    run = fixture_named("p02").run
    lora = peft_folder(tmp_path / "peft", adapter(LAYER.format(0), 32, 32))
    report = convert(lora, tmp_path / "out", HuggingFace(arguments=["rotary_base=500000"]), merge=run)
    assert "rotary_base is 500000, as passed; the checkpoint stores 10000" in report.notes
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_theta"] == 500000
    with pytest.raises(UsageError, match="contradicts the layout of the job that wrote the checkpoint"):
        convert(lora, tmp_path / "no", HuggingFace(arguments=["tensor_model_parallel_size=1"]), merge=run)


def test_matrices_that_lie_the_other_way_round(models: dict[str, Path], tmp_path: Path) -> None:
    module = "transformer.h.0.attn.c_attn"
    lora = peft_folder(tmp_path / "peft", adapter(module, 96, 32), fan_in_fan_out=True)
    with pytest.raises(CheckpointError, match="GPT-2, whose matrices are transposed"):
        convert(lora, tmp_path / "out", HuggingFace(), merge=models["gpt2"])


def test_a_destination_within_the_base(base: Path, tmp_path: Path) -> None:
    lora = peft_folder(tmp_path / "peft", adapter(LAYER.format(0), 32, 32))
    with pytest.raises(CheckpointError, match="inside the source.*found: .*base is read"):
        convert(lora, base / "within", HuggingFace(), merge=base)


def test_several_ranks_are_merged_and_not_for_bridge(base: Path, tmp_path: Path) -> None:
    other = {name: tensor.repeat(2, 1) if "lora_A" in name else tensor.repeat(1, 2)
             for name, tensor in adapter(LAYER.format(1), 32, 32).items()}  # fmt: skip
    both = adapter(LAYER.format(0), 32, 32) | other
    lora = peft_folder(tmp_path / "peft", both, rank_pattern={LAYER.format(1): 6})
    with pytest.raises(CheckpointError, match="have different ranks.*--merge FOLDER --to hf"):
        convert(lora, tmp_path / "run", BRIDGE, weights=base)
    assert convert(lora, tmp_path / "merged", HuggingFace(), merge=base).records


def test_peft_folders_are_compared(base: Path, tmp_path: Path) -> None:
    content = {**adapter(LAYER.format(0), 32, 32), **adapter(LAYER.format(1), 32, 32)}
    same, alpha = (peft_folder(tmp_path / name, content, lora_alpha=of) for name, of in (("same", 5), ("alpha", 7)))
    last = {name: tensor + 1 if "lora_B" in name else tensor for name, tensor in content.items()}
    assert compare(same, peft_folder(tmp_path / "twin", content), weights=base).equal
    found = compare(same, alpha, weights=base)
    assert ("adapters multiplied by", "5 / rank", "7 / rank") in [(fact.what, fact.a, fact.b) for fact in found.facts]
    assert not compare(same, peft_folder(tmp_path / "last", last), weights=base).equal
    convert(same, tmp_path / "run", BRIDGE, weights=base)
    assert compare(same, tmp_path / "run", weights=base).equal
