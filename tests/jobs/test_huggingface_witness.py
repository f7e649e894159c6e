"""Compare conversions independently: genuine Megatron loads them, and answers as transformers does.

Under the first of a model's layouts it loads a conversion, under all others the Hugging Face folder itself, or legacy
files for that layout.
Two ranks serve all models: TP1 on both, TP2, and for experts EP2; first with the local layer spec, then with
Transformer Engine's, whose modules are genuine and compute in torch what their kernels would (`engine_passes`). The
deliberate mistakes are families in a user's own file, so that they also test `--family`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_on_cpu import launch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import mcore_ckpt_ext
from mcore_ckpt_ext.families.forward_pass import classified_arguments
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint
from mcore_ckpt_ext.formats.target import LayerSpec
from mcore_ckpt_ext.job.arguments.run import HYBRID_SPECS
from tests.harness.huggingface import MISTAKES, VOCABULARY, add_further_layer, assert_same_tensors
from tests.harness.jobs import MAMBA_KERNELS, TIME_LIMIT, WITNESS
from tests.harness.packages import with_transformer_engine
from tests.harness.published_logits import (
    INNER_NORMS,
    OWN_ROUNDINGS,
    TOKENS,
    TOLERANCE,
    ExpectedLogits,
    expected_logits,
    megatron_case,
)
from tests.harness.witnesses import CASES, LAYOUTS, OF_OWN_CODE, WITNESSED

pytestmark = pytest.mark.nightly

Case = tuple[str, str, str]
LOCAL: LayerSpec = "local"
ENGINE: LayerSpec = "transformer_engine"
PROMPT, NEW_TOKENS = 16, 64
# A sample of the published configurations, of which `tests/slow/test_published_logits.py` has more.
PUBLISHED = ("ministral3-3b", "mx--deepseek3_671b", "gpt-oss-120b")
# Models to which an MTP layer is added.
WITH_MTP = ["deepseek_v3", "glm4_moe"]
# With its cache, transformers' indexer chooses other tokens than without.
OTHER_WAYS = ("deepseek_v32", "glm_moe_dsa")
# Models and layouts for which legacy files are loaded.
AS_LEGACY = [("qwen3_next", "TP2"), ("qwen3_5", "TP2"), ("qwen3_5_moe", "EP2"), ("deepseek_v32", "EP2")]
# Models of another class than GPTModel, which Megatron itself saves.
HYBRIDS = ("nemotron_h", "mamba2")
SAVED, REWRITTEN = "saved", "rewritten"
OWN_CODE, OWN_VOCABULARY = Path(__file__).parents[1] / "huggingface" / "own_code", 64
OWN_TOKENS = torch.arange(40).view(2, 20) * 7 % OWN_VOCABULARY
WRONG = ["ExchangedQueriesAndKeys", "InterleavedHalves"]


@dataclass(frozen=True)
class Truth:
    """What transformers answers: tokens that it chose itself, `[2, 80]`, and the logits of them all.

    Attributes:
        tokens: the prompt, then what it chose.
        logits: of all of them at once, `[2, 80, vocabulary]`.
        rounding: how far they are from the logits by which it chose, token after token, relative to the largest.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    rounding: float = 0.0

    @property
    def tolerance(self) -> float:
        """How far another's answer may be."""
        return max(TOLERANCE, OWN_ROUNDINGS * self.rounding)

    @property
    def chosen(self) -> torch.Tensor:
        """What it chooses after each part of the text, `[2, 64]`."""
        return self.logits[:, PROMPT - 1 : -1].argmax(-1)


@pytest.fixture(scope="module")
def truths(models: dict[str, Path]) -> dict[str, Truth]:
    return {name: _truth(models[name], name not in OTHER_WAYS) for name in WITNESSED}


def _truth(folder: Path, consistent: bool = True) -> Truth:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    for name, module in model.named_modules():
        if name.endswith(INNER_NORMS):
            module.variance_epsilon = model.config.rms_norm_eps
    prompt = torch.randint(0, VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        everywhere = torch.ones_like(prompt)
        made = model.generate(
            prompt, attention_mask=everywhere, max_new_tokens=NEW_TOKENS, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        truth = Truth(made.sequences, model(made.sequences).logits)
    assert torch.equal(truth.chosen, truth.tokens[:, PROMPT:]) == consistent
    if not consistent:
        return truth
    apart = (torch.stack(made.logits, 1) - truth.logits[:, PROMPT - 1 : -1]).abs().max() / truth.logits.abs().max()
    return replace(truth, rounding=float(apart))


@pytest.fixture(scope="module")
def published(root: Path) -> dict[str, ExpectedLogits]:
    """Make the models of the published configurations, each in a folder of its name."""
    return {name: expected_logits(name, root / name) for name in PUBLISHED}


@pytest.fixture(scope="module")
def answers(
    models: dict[str, Path], truths: dict[str, Truth], published: dict[str, ExpectedLogits], root: Path
) -> dict[Case, torch.Tensor]:
    """Megatron's logits of transformers' tokens, by layer spec, model and layout; each spec has a launch."""
    for name, truth in truths.items():
        torch.save(truth.tokens, root / f"{name}.tokens")
    local = [_case(models[name], root, LOCAL, name, layout) for spec, name, layout in CASES if spec == LOCAL]
    for name in WITH_MTP:
        longer = root / f"{name}_further-model"
        shutil.copytree(models[name], longer)
        add_further_layer(longer)
        local.append({**_case(longer, root, LOCAL, f"{name}_further", "TP2"), "tokens": str(root / f"{name}.tokens")})
    torch.save(OWN_TOKENS, root / "own.tokens")
    for name, layout in OF_OWN_CODE.items():
        case = _case(OWN_CODE / name, root, LOCAL, name, layout)
        local.append({**case, "tokens": str(root / "own.tokens"), "vocabulary": OWN_VOCABULARY})
    torch.save(TOKENS, root / "published.tokens")
    local += [megatron_case(name, root / name, LOCAL, root / "published.tokens") for name in published]
    for wrong in WRONG:
        case = _case(models["llama"], root, LOCAL, wrong, "TP1", family=f"{MISTAKES}:{wrong}")
        local.append({**case, "tokens": str(root / "llama.tokens")})
    answers = _answers(root / LOCAL, local)
    with pytest.MonkeyPatch.context() as patch:
        with_transformer_engine(patch)
        engine = [_case(models[name], root, spec, name, layout) for spec, name, layout in CASES if spec != LOCAL]
        for name in HYBRIDS:
            engine += _saved_by_megatron(next(case for case in engine if case["name"] == name), root)
        return answers | _answers(root / ENGINE, engine, MAMBA_KERNELS, launch.ENGINE_PASSES)


def _saved_by_megatron(case: dict[str, Any], root: Path) -> list[dict[str, Any]]:
    """Return cases of a hybrid model: TP2 saves it, TP1 loads that, and loads what a conversion makes of it."""
    names = {step: f"{case['name']}_{step}" for step in (SAVED, REWRITTEN)}
    saved, rewritten = (root / name for name in names.values())
    tensor, expert = LAYOUTS["TP2"]
    flags = [*case["flags"], "--spec", *HYBRID_SPECS[0], "--save", str(saved), "--save-interval", "1"]
    saving = {**case, "name": names[SAVED], "layout": "TP2", "tensor": tensor, "expert": expert, "flags": flags}
    loading = {**case, "name": names[SAVED], "layout": "TP1", "run": str(saved)}
    convert = ["convert", str(saved), str(rewritten), "--to", "torch_dist"]
    again = {**loading, "name": names[REWRITTEN], "run": str(rewritten), "commands": [convert]}
    cases = [saving, loading, again]
    return [{**one, "answer": str(root / f"{one['name']}-{one['layout']}.answer")} for one in cases]


def _answers(folder: Path, cases: list[dict[str, Any]], *plugins: Path) -> dict[Case, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    result = launch.run(
        2, WITNESS, [str(folder / "cases.json")], timeout=TIME_LIMIT, log_file=folder / "log", plugin_files=plugins
    )
    assert result.returncode == 0, result.output[-6000:]
    return {(folder.name, case["name"], case["layout"]): torch.load(case["answer"]) for case in cases}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("witness")


def _case(
    model: Path, root: Path, spec: LayerSpec, name: str, layout: str, family: str | None = None
) -> dict[str, Any]:
    """One question; the model is converted for the first of its layouts, the folder itself is loaded for the others."""
    run, (tensor, expert) = root / spec / name, LAYOUTS[layout]
    format_of: list[str] = []
    if run.exists() and (name, layout) in AS_LEGACY:
        run, format_of = root / f"{name}_legacy", ["--ckpt-format", "torch"]
        sizes = {"tensor_model_parallel_size": tensor, "expert_model_parallel_size": expert}
        mcore_ckpt_ext.convert(model, run, mcore_ckpt_ext.Legacy(**sizes))
    elif run.exists():
        run = model
    else:
        mcore_ckpt_ext.convert(model, run, mcore_ckpt_ext.TorchDist(transformer_impl=spec), family=family)
    checkpoint = open_checkpoint(model, transformer_impl=spec).format.reader
    assert isinstance(checkpoint, HuggingFaceCheckpoint)
    # Layers that differ are read from the folder's own file.
    flags = [str(model / flag) if flag == "config.json" else flag for flag in checkpoint.training_flags()]
    return {
        "name": name, "layout": layout, "run": str(run),
        "flags": [*flags, "--transformer-impl", spec, *format_of], "as_gemma": checkpoint.family.name == "Gemma",
        "tensor": tensor, "expert": expert, "vocabulary": VOCABULARY, "tokens": str(root / f"{name}.tokens"),
        "answer": str(root / f"{name}-{layout}-{spec}.answer"),
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
    return torch.equal(chosen, truth.chosen)


@pytest.mark.parametrize(("spec", "name", "layout"), CASES)
def test_megatron_answers_as_transformers_does(
    spec: str, name: str, layout: str, answers: dict[Case, torch.Tensor], truths: dict[str, Truth]
) -> None:
    answer = answers[spec, name, layout]
    assert answer.dtype == torch.float32
    assert difference(answer, truths[name]) <= truths[name].tolerance
    assert decodes_alike(answer, truths[name])


@pytest.mark.parametrize(("name", "layout"), OF_OWN_CODE.items())
def test_megatron_answers_as_the_code_of_a_folder_does(
    name: str, layout: str, answers: dict[Case, torch.Tensor]
) -> None:
    """A class that transformers does not have: its answer lies beside the model that it built."""
    truth = load_file(OWN_CODE / name / "logits.safetensors")["logits"]
    answer = answers[LOCAL, name, layout][..., :OWN_VOCABULARY]
    assert float((answer - truth).abs().max() / truth.abs().max()) <= TOLERANCE


@pytest.mark.parametrize(("name", "layout"), [*zip(PUBLISHED, ("TP2", "EP2", "EP2"), strict=True)])
def test_megatron_computes_the_logits_of_published_configurations(
    name: str, layout: str, answers: dict[Case, torch.Tensor], published: dict[str, ExpectedLogits]
) -> None:
    assert published[name].excess(answers[LOCAL, name, layout]) <= 1


@pytest.mark.parametrize("name", WITH_MTP)
def test_megatron_takes_up_the_layer_that_predicts_a_further_token(
    name: str, answers: dict[Case, torch.Tensor], truths: dict[str, Truth]
) -> None:
    """Every parameter of it is found under its name and in its shape; the model's own answer is what it was."""
    assert difference(answers[LOCAL, f"{name}_further", "TP2"], truths[name]) <= truths[name].tolerance


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize(("step", "layout"), [(SAVED, "TP2"), (SAVED, "TP1"), (REWRITTEN, "TP1")])
def test_a_hybrid_that_megatron_saved_goes_on(
    name: str, step: str, layout: str, answers: dict[Case, torch.Tensor], truths: dict[str, Truth]
) -> None:
    """The folder as Megatron saved it, and its conversion, load and answer alike; no state is missing."""
    assert difference(answers[ENGINE, f"{name}_{step}", layout], truths[name]) <= truths[name].tolerance


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_that_megatron_saved_is_exported(
    name: str, answers: dict[Case, torch.Tensor], models: dict[str, Path], root: Path, tmp_path: Path
) -> None:
    target = mcore_ckpt_ext.HuggingFace(vocab_size=VOCABULARY)
    report = mcore_ckpt_ext.convert(root / f"{name}_{SAVED}", tmp_path / "exported", target)
    assert_same_tensors(models[name], tmp_path / "exported")
    assert not [note for note in report.notes if "computation is unknown" in note]


@pytest.mark.parametrize("mistake", WRONG)
def test_a_deliberate_mistake_is_seen(
    mistake: str, answers: dict[Case, torch.Tensor], truths: dict[str, Truth]
) -> None:
    assert difference(answers[LOCAL, mistake, "TP1"], truths["llama"]) > 1000 * truths["llama"].tolerance
    assert not decodes_alike(answers[LOCAL, mistake, "TP1"], truths["llama"])


def test_every_argument_of_the_parser_is_classified(answers: dict[Case, torch.Tensor], root: Path) -> None:
    """The installed Megatron's own parser: what a new release adds has to be read, and given a class."""
    names = set(json.loads((root / LOCAL / "arguments.json").read_text())) - {"help"}
    assert len(names) > 400
    assert sorted(names - classified_arguments(names)) == []
