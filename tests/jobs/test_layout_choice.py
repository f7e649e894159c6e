"""The rules of `layout_choice` against genuine Megatron: what it accepts, and what each pipeline stage then holds."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
from megatron_on_cpu import launch

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.local_parameters import model_space_name, whole_cut
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.memory import Buffers
from mcore_ckpt_ext.layout_choice.model_table import (
    ModelTable,
    PaddedRows,
    Parameter,
    embedding_copies,
    place_after_layers,
)
from mcore_ckpt_ext.layout_choice.rules import Choice, violations
from mcore_ckpt_ext.layout_choice.search import SearchRequest, search
from mcore_ckpt_ext.layout_choice.stage_split import applied_split
from mcore_ckpt_ext.model_space.anatomy import in_vocabulary
from mcore_ckpt_ext.model_space.names import parse, split_layer
from mcore_ckpt_ext.versions import Version, parse_version
from tests.harness import checkouts
from tests.harness.jobs import RANK_SCRIPTS

SEED = 20261126
PAIRS = 42
"""Random layouts of each model: with fourteen models, more than 500 pairs."""
COMMON = ["--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "2", "--tokenizer-type", "NullTokenizer"]
COMMON += ["--mock-data", "--bf16", "--use-distributed-optimizer", "--transformer-impl", "local"]
COMMON += [f"--no-{kind}-fusion" for kind in ("gradient-accumulation", "masked-softmax", "bias-gelu", "bias-swiglu")]
COMMON += ["--no-bias-dropout-fusion", "--no-rope-fusion", "--no-persist-layer-norm"]
PLAIN = "--position-embedding-type learned_absolute"
TIED = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
LLAMA = f"{TIED} --untie-embeddings-and-output-weights"
EXPERTS = f"{LLAMA} --moe-router-topk 2 --moe-token-dispatcher-type alltoall"


def sizes(layers: int, hidden: int, heads: int, length: int, vocabulary: int) -> str:
    """The arguments that every model has."""
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {length} "
        f"--vocab-size {vocabulary}"
    )


MODELS: Mapping[str, str] = {
    "gpt": f"{PLAIN} {sizes(4, 32, 4, 32, 127)}",
    "twelve layers": f"{PLAIN} {sizes(12, 48, 12, 96, 300)}",
    "seven layers": f"{LLAMA} {sizes(7, 48, 6, 48, 200)}",
    "five layers": f"{PLAIN} {sizes(5, 64, 8, 64, 1000)}",
    "llama": f"{LLAMA} {sizes(8, 64, 8, 64, 500)} --group-query-attention --num-query-groups 2",
    "odd feed-forward": f"{LLAMA} {sizes(4, 64, 16, 32, 127)} --ffn-hidden-size 90 --group-query-attention "
    "--num-query-groups 4",
    "odd tied": f"{PLAIN} {sizes(6, 36, 9, 36, 127)} --ffn-hidden-size 60 --make-vocab-size-divisible-by 64",
    "experts": f"{EXPERTS} {sizes(4, 32, 4, 32, 127)} --num-experts 8",
    "dense first": f"{EXPERTS} {sizes(6, 32, 8, 48, 127)} --num-experts 6 --moe-layer-freq [0,1,1,1,1,1] "
    "--moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 48",
    "all experts": f"{EXPERTS} {sizes(8, 32, 4, 32, 127)} --ffn-hidden-size 50 --moe-ffn-hidden-size 16 "
    "--num-experts 4",
    "latent": f"{LLAMA} {sizes(4, 32, 4, 32, 127)} --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 "
    "--qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8",
    "predicting": f"{LLAMA} {sizes(6, 32, 4, 32, 127)} --mtp-num-layers 1",
    "predicting, tied": f"{TIED} {sizes(5, 32, 4, 32, 127)} --mtp-num-layers 2",
    "shared groups": f"{LLAMA} {sizes(3, 64, 16, 32, 127)} --group-query-attention --num-query-groups 1 "
    "--kv-channels 4",
}
AT_RUN_TIME = {"sequence length"}
"""Rules of which a part shows in the forward pass alone."""


@dataclass(frozen=True)
class Case:
    """A model under a layout, and the arguments that divide its layers."""

    model: str
    layout: ParallelLayout
    split: Mapping[str, Any]
    micro_batch: int
    global_batch: int

    def words(self) -> list[str]:
        """The job's command line."""
        layout, split = self.layout, dict(self.split)
        words = [*COMMON, *MODELS[self.model].split(), "--max-position-embeddings", "128"]
        words[words.index("--micro-batch-size") + 1] = str(self.micro_batch)
        words += ["--global-batch-size", str(self.global_batch)]
        words += ["--tensor-model-parallel-size", str(layout.tensor)]
        words += ["--pipeline-model-parallel-size", str(layout.pipeline)]
        words += ["--expert-model-parallel-size", str(layout.expert)]
        words += ["--expert-tensor-parallel-size", str(layout.expert_tensor)]
        words += ["--context-parallel-size", str(layout.context)]
        if layout.virtual_pipeline > 1 and not split.get("pipeline_model_parallel_layout"):
            words += ["--num-virtual-stages-per-pipeline-rank", str(layout.virtual_pipeline)]
        for name, value in split.items():
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)] if value else []
        return words


def judged(cases: Sequence[Case], checkout: str | None, folder: Path) -> list[dict[str, Any]]:
    """What genuine Megatron makes of each case."""
    asked = [{"arguments": case.words(), "world": case.layout.world} for case in cases]
    (folder / "cases.json").write_text(json.dumps(asked))
    command = [sys.executable, RANK_SCRIPTS / "accepted_layouts.py", folder / "cases.json", folder / "results.json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(launch.__file__).parents[1]), "MCORE_CKPT_EXT": "0"}
    done = subprocess.run(
        [*command, *([checkout] if checkout else [])], env=environment, timeout=500, check=False, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads((folder / "results.json").read_text())
    assert parse_version(answer["version"]) == version_of(checkout is not None)
    results: list[dict[str, Any]] = answer["results"]
    return results


def plain_layout(**sizes: int) -> ParallelLayout:
    """A layout of these sizes; all others are 1."""
    names = ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor", "context", "data", "world")
    return ParallelLayout(**{**dict.fromkeys(names, 1), **sizes})


def table_of(result: Mapping[str, Any]) -> tuple[JobArguments, ModelTable]:
    """A model's arguments and parameters, by genuine Megatron on one rank."""
    job = JobArguments.of(result["arguments"])
    parameters = []
    for local, shape in result["stages"][0][0]:
        name = model_space_name(local, 0, 0, job)
        layer, _ = split_layer(name)
        place = layer.number if layer else (-1 if name.startswith("embedding.") else place_after_layers(name, job))
        tokens = in_vocabulary(name)
        whole = (job.vocab_size, *shape[1:]) if tokens else tuple(shape)
        cut = whole_cut(name, tuple(shape), job)
        parameters.append(Parameter(name, whole, 2, place, cut, parse(name).expert, tokens, 12, 12))
    rows = PaddedRows(job.vocab_size, 0, job.make_vocab_size_divisible_by)
    return job, ModelTable(parameters, job.num_layers, copies=embedding_copies(job), padded_rows=rows)


def random_cases(models: Mapping[str, JobArguments]) -> Iterator[Case]:
    """Layouts of all kinds, most of which some rule excludes."""
    dice = random.Random(SEED)
    for model, job in models.items():
        for _ in range(PAIRS):
            tensor, pipeline = dice.choice([1, 1, 2, 2, 3, 4, 8]), dice.choice([1, 1, 2, 2, 3, 4, 5, 6])
            virtual = dice.choice([1, 1, 1, 2, 3]) if pipeline > 1 else 1
            has_experts = bool(job.num_experts)
            expert = dice.choice([1, 2, 3, 4]) if has_experts else dice.choice([1] * 9 + [2])
            expert_tensor = dice.choice([tensor, tensor, 1, 2]) if expert > 1 else tensor
            data = dice.choice([1, 2, 3, 4])
            split = dice.choice([{}, {}, {}, {}, *_splits(dice, job.num_layers or 0, pipeline)])
            world = tensor * pipeline * data + dice.choice([0] * 12 + [1])
            data = max(1, world // (tensor * pipeline))
            layout = plain_layout(
                tensor=tensor, pipeline=pipeline, virtual_pipeline=virtual, expert=expert, expert_tensor=expert_tensor,
                data=data, world=world,
            )  # fmt: skip
            micro = dice.choice([1, 2])
            yield Case(model, layout, split, micro, dice.choice([*[data * micro * 4] * 5, 8]))


def _splits(dice: random.Random, layers: int, pipeline: int) -> list[dict[str, Any]]:
    if pipeline == 1:
        return [{}]
    # Their sum stays below the number of layers: Megatron does not check that, and builds other models.
    first = dice.randint(1, layers - 1)
    last = dice.randint(1, layers - first)
    return [
        {"decoder_first_pipeline_num_layers": first},
        {"decoder_last_pipeline_num_layers": dice.randint(1, layers)},
        {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last},
        {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        {"account_for_loss_in_pipeline_split": True},
    ]


def choice_of(case: Case, job: JobArguments, table: ModelTable, version: Version) -> Choice:
    """The case as this package sees it."""
    extra = job.mtp_num_layers or 0
    split = applied_split(job, case.split, case.layout.pipeline, case.layout.virtual_pipeline, extra)
    return Choice(job, table, case.layout, split, case.micro_batch, case.global_batch, version)


def check_stages(case: Case, choice: Choice, result: Mapping[str, Any]) -> None:
    """The elements on the first rank of each pipeline stage are those of the genuine model."""
    layout = case.layout
    assert choice.split is not None
    held = choice.table.stages(choice.split.ranges(), layout.tensor, layout.expert_tensor, layout.expert)
    genuine = [sum(prod(shape) for chunk in stage for _, shape in chunk) for stage in result["stages"]]
    assert [stage.dense.elements + stage.experts.elements for stage in held] == genuine, case


@cache
def version_of(checkout: bool) -> Version:
    """The release that judges."""
    import megatron.core

    found = parse_version(checkouts.full_version() if checkout else megatron.core.__version__)
    assert found is not None
    return found


@pytest.fixture(scope="module", params=checkouts.EITHER)
def release(request: pytest.FixtureRequest) -> tuple[Version, str | None]:
    """A release's number, and the folder that it is imported from; None for the installed one."""
    return version_of(request.param), os.environ[checkouts.VARIABLE] if request.param else None


@pytest.fixture(scope="module")
def models(
    release: tuple[Version, str | None], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[JobArguments, ModelTable]]:
    """Every model, by its name."""
    # Since 0.20, layers of multi-token prediction cannot be built where Transformer Engine is not installed.
    names = [model for model in MODELS if release[0] < (0, 20) or not model.startswith("predicting")]
    cases = [Case(model, plain_layout(), {}, 1, 8) for model in names]
    results = judged(cases, release[1], tmp_path_factory.mktemp("models"))
    assert not [result for result in results if "error" in result]
    return {case.model: table_of(result) for case, result in zip(cases, results, strict=True)}


def test_what_megatron_accepts(
    release: tuple[Version, str | None], models: dict[str, tuple[JobArguments, ModelTable]], tmp_path: Path
) -> None:
    """Of more than 500 random pairs of a model and a layout, exactly those are valid that genuine Megatron builds."""
    cases = list(random_cases({name: job for name, (job, _) in models.items()}))
    results = judged(cases, release[1], tmp_path)
    differing, accepted = [], 0
    for case, result in zip(cases, results, strict=True):
        choice = choice_of(case, *models[case.model], release[0])
        broken = [(rule, reason) for rule, reason in violations(choice) if rule not in AT_RUN_TIME]
        broken = [one for one in broken if not (one[0] == "batch sizes" and "with VPP" in one[1])]
        if bool(broken) != ("error" in result):
            differing.append((case, broken, result.get("error")))
        elif not broken:
            accepted += 1
            check_stages(case, choice, result)
    assert not differing, f"{len(differing)}: {differing[:5]}"
    assert len(cases) == PAIRS * len(models) and accepted > 100


def test_what_is_listed(
    release: tuple[Version, str | None], models: dict[str, tuple[JobArguments, ModelTable]], tmp_path: Path
) -> None:
    """Genuine Megatron builds every layout that is listed, and its stages hold what the plan says."""
    dice = random.Random(SEED)
    cases, choices = [], []
    for name, (job, table) in models.items():
        for gpus in (8, 12, 24):
            wish = SearchRequest(gpus, 8, release[0])
            old = replace(plain_layout(), data=gpus, world=gpus)
            found = search(job, table, old, wish, Buffers(4)).found
            for one in dice.sample(found, min(5, len(found))):
                choice = one.choice
                split = {k: v for k, v in dict(choice.split.arguments).items() if v} if choice.split else {}
                cases.append(Case(name, choice.layout, split, choice.micro_batch, choice.global_batch))
                choices.append(choice)
    results = judged(cases, release[1], tmp_path)
    refused = [(case, result["error"]) for case, result in zip(cases, results, strict=True) if "error" in result]
    assert not refused, f"{len(refused)}: {refused[:5]}"
    for case, choice, result in zip(cases, choices, results, strict=True):
        check_stages(case, choice, result)
    assert any(case.split for case in cases) and any(case.layout.virtual_pipeline > 1 for case in cases)
