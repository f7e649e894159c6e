"""The independent witness: genuine Megatron loads what was converted, and answers as transformers does.

One world of two ranks serves all models: TP1 on both, TP2, and for experts EP2. The deliberate mistakes are families
of a user's own file, so they show `--family`, too.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_on_cpu import launch
from transformers import AutoModelForCausalLM

import mcore_ckpt_ext
from mcore_ckpt_ext.families.forward_pass import classified
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.huggingface import LOCAL, HuggingFaceCheckpoint
from tests.harness.huggingface import MISTAKES, VOCABULARY, add_further_layer
from tests.harness.jobs import TIME_LIMIT, WITNESS
from tests.harness.witnesses import BUILT_BY_MEGATRON, CASES, LAYOUTS

TOLERANCE = 1e-5
PROMPT, NEW_TOKENS = 16, 64
# Models to which a layer is added that predicts a further token.
FURTHER = ["deepseek_v3", "glm4_moe"]
WRONG = ["ExchangedQueriesAndKeys", "InterleavedHalves"]


@dataclass(frozen=True)
class Truth:
    """What transformers answers: tokens that it chose itself, `[2, 80]`, and the logits of them all."""

    tokens: torch.Tensor
    logits: torch.Tensor


@pytest.fixture(scope="module")
def truths(models: dict[str, Path]) -> dict[str, Truth]:
    return {name: _truth(models[name]) for name in BUILT_BY_MEGATRON}


def _truth(folder: Path) -> Truth:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompt = torch.randint(0, VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        everywhere = torch.ones_like(prompt)
        tokens = model.generate(prompt, attention_mask=everywhere, max_new_tokens=NEW_TOKENS, do_sample=False)
        return Truth(tokens, model(tokens).logits)


@pytest.fixture(scope="module")
def answers(models: dict[str, Path], truths: dict[str, Truth], root: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Megatron's logits of transformers' tokens, by model and layout."""
    cases = []
    for name in BUILT_BY_MEGATRON:
        mcore_ckpt_ext.convert(models[name], root / name, mcore_ckpt_ext.TorchDist(transformer_impl=LOCAL))
        torch.save(truths[name].tokens, root / f"{name}.tokens")
        cases += [_case(models, root, name, name, layout) for one, layout in CASES if one == name]
    for name in FURTHER:
        longer = f"{name}_further"
        models = {**models, longer: root / f"{longer}-model"}
        shutil.copytree(models[name], models[longer])
        add_further_layer(models[longer])
        mcore_ckpt_ext.convert(models[longer], root / longer, mcore_ckpt_ext.TorchDist(transformer_impl=LOCAL))
        cases.append({**_case(models, root, longer, longer, "TP2"), "tokens": str(root / f"{name}.tokens")})
    for wrong in WRONG:
        mcore_ckpt_ext.convert(
            models["llama"],
            root / wrong,
            mcore_ckpt_ext.TorchDist(transformer_impl=LOCAL),
            family=f"{MISTAKES}:{wrong}",
        )
        cases.append(_case(models, root, "llama", wrong, "TP1"))
    (root / "cases.json").write_text(json.dumps(cases))
    result = launch.run(2, WITNESS, [str(root / "cases.json")], timeout=TIME_LIMIT, log_file=root / "log")
    assert result.returncode == 0, result.output[-6000:]
    return {(case["name"], case["layout"]): torch.load(case["answer"]) for case in cases}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("witness")


def _case(models: dict[str, Path], root: Path, model: str, name: str, layout: str) -> dict[str, Any]:
    checkpoint = open_checkpoint(models[model], transformer_impl=LOCAL)
    assert isinstance(checkpoint, HuggingFaceCheckpoint)
    tensor, expert = LAYOUTS[layout]
    return {
        "name": name, "layout": layout, "run": str(root / name), "flags": checkpoint.training_flags(),
        "tensor": tensor, "expert": expert, "vocabulary": VOCABULARY, "tokens": str(root / f"{model}.tokens"),
        "answer": str(root / f"{name}-{layout}.answer"),
    }  # fmt: skip


def difference(answer: torch.Tensor, truth: Truth) -> float:
    """The largest difference of the logits, relative to the largest logit; the vocabulary's padding is left out."""
    return float((answer[..., :VOCABULARY] - truth.logits).abs().max() / truth.logits.abs().max())


def decodes_alike(answer: torch.Tensor, truth: Truth) -> bool:
    """Whether greedy decoding takes the same way.

    The first token that both choose after the same prompt is the same, then the next one after that, and so on: what
    Megatron would choose after each part of transformers' own text is what transformers chose.
    """
    chosen = answer[:, PROMPT - 1 : -1, :VOCABULARY].argmax(-1)
    assert chosen.shape[1] == NEW_TOKENS
    return torch.equal(chosen, truth.tokens[:, PROMPT:])


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_megatron_answers_as_transformers_does(
    name: str, layout: str, answers: dict[tuple[str, str], torch.Tensor], truths: dict[str, Truth]
) -> None:
    assert answers[name, layout].dtype == torch.float32
    assert difference(answers[name, layout], truths[name]) <= TOLERANCE
    assert decodes_alike(answers[name, layout], truths[name])


@pytest.mark.parametrize("name", FURTHER)
def test_megatron_takes_up_the_layer_that_predicts_a_further_token(
    name: str, answers: dict[tuple[str, str], torch.Tensor], truths: dict[str, Truth]
) -> None:
    """Every parameter of it is found under its name and in its shape; the model's own answer is what it was."""
    assert difference(answers[f"{name}_further", "TP2"], truths[name]) <= TOLERANCE


@pytest.mark.parametrize("mistake", WRONG)
def test_a_deliberate_mistake_is_seen(
    mistake: str, answers: dict[tuple[str, str], torch.Tensor], truths: dict[str, Truth]
) -> None:
    assert difference(answers[mistake, "TP1"], truths["llama"]) > 1000 * TOLERANCE
    assert not decodes_alike(answers[mistake, "TP1"], truths["llama"])


def test_every_argument_of_the_parser_is_classified(answers: dict[tuple[str, str], torch.Tensor], root: Path) -> None:
    """The installed Megatron's own parser: what a new release adds has to be read, and given a class."""
    names = set(json.loads((root / "arguments.json").read_text())) - {"help"}
    assert len(names) > 400
    assert sorted(names - classified(names)) == []
