"""Compare the rules of `layout_choice` with genuine Megatron: accepted layouts, and each stage's layers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_on_cpu import launch

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.local_parameters import model_space_name, newest_cuts
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.parameter_parts import parts_of
from mcore_ckpt_ext.layout_choice.choice import Choice
from mcore_ckpt_ext.layout_choice.found_layout import SearchRequest
from mcore_ckpt_ext.layout_choice.layer_wise import LayerWise, pack
from mcore_ckpt_ext.layout_choice.memory import Buffers
from mcore_ckpt_ext.layout_choice.model_table import (
    ModelTable,
    Parameter,
    embedding_copies,
    place_after_layers,
)
from mcore_ckpt_ext.layout_choice.padded_rows import PaddedRows
from mcore_ckpt_ext.layout_choice.rules import violations
from mcore_ckpt_ext.layout_choice.search import search
from mcore_ckpt_ext.layout_choice.stage_split import applied_split
from mcore_ckpt_ext.model_space.anatomy import is_in_vocabulary
from mcore_ckpt_ext.model_space.names import parse, split_layer
from mcore_ckpt_ext.versions import Version, parse_version
from tests.harness import checkouts
from tests.harness.jobs import RANK_SCRIPTS

pytestmark = pytest.mark.nightly

SEED = 20261126
PAIRS = 36
"""Random layouts of each model: with fifteen models or more, more than 500 pairs."""
COMMON = ["--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "2", "--tokenizer-type", "NullTokenizer"]
COMMON += ["--mock-data", "--bf16", "--use-distributed-optimizer"]
COMMON += [f"--no-{kind}-fusion" for kind in ("gradient-accumulation", "masked-softmax", "bias-gelu", "bias-swiglu")]
COMMON += ["--no-bias-dropout-fusion", "--no-rope-fusion", "--no-persist-layer-norm"]
PLAIN = "--position-embedding-type learned_absolute"
TIED = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
LLAMA = f"{TIED} --untie-embeddings-and-output-weights"
MAMBA = "--position-embedding-type none --normalization RMSNorm --disable-bias-linear "
MAMBA += "--untie-embeddings-and-output-weights --mamba-state-dim 8 --mamba-head-dim 8"
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
    "hybrid": f"{MAMBA} {sizes(8, 64, 8, 64, 127)} --hybrid-override-pattern M*M-M*M- --mamba-num-groups 4 "
    "--mamba-num-heads 16",
    "hybrid, few groups": f"{MAMBA} {sizes(6, 48, 12, 48, 127)} --hybrid-override-pattern M*M-MM --mamba-num-groups 2",
    "hybrid in segments": f"{MAMBA} {sizes(8, 64, 8, 64, 127)} --hybrid-layer-pattern M*|M-|M*|M- --mamba-num-groups 4 "
    "--mamba-num-heads 16",
}
SEGMENTS = 4
Matrices = tuple[Sequence[Sequence[int]], int]
AT_RUN_TIME = {"batch sizes": "with VPP", "sequence length": "CP x TP"}
"""Rules of which a part shows in the forward pass alone, and what that part says."""


@dataclass(frozen=True)
class Case:
    """A model under a layout, and the arguments that divide its layers."""

    model: str
    layout: ParallelLayout
    split: Mapping[str, Any]
    micro_batch: int
    global_batch: int
    implementation: str = "local"

    def words(self) -> list[str]:
        """The job's command line."""
        layout, split = self.layout, dict(self.split)
        words = [*COMMON, *MODELS[self.model].split(), "--max-position-embeddings", "128"]
        words[words.index("--micro-batch-size") + 1] = str(self.micro_batch)
        words += ["--global-batch-size", str(self.global_batch), "--transformer-impl", self.implementation]
        words += ["--tensor-model-parallel-size", str(layout.tensor)]
        words += ["--pipeline-model-parallel-size", str(layout.pipeline)]
        words += ["--expert-model-parallel-size", str(layout.expert)]
        words += ["--expert-tensor-parallel-size", str(layout.expert_tensor)]
        words += ["--context-parallel-size", str(layout.context)]
        has_segments = "--hybrid-layer-pattern" in words
        if layout.virtual_pipeline > 1 and not split.get("pipeline_model_parallel_layout") and not has_segments:
            words += ["--num-virtual-stages-per-pipeline-rank", str(layout.virtual_pipeline)]
        for name, value in split.items():
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)] if value else []
        return words


def answers_of(
    cases: Sequence[Case], checkout: str | None, folder: Path, matrices: Sequence[Matrices] = ()
) -> dict[str, Any]:
    """What genuine Megatron makes of each case, and how it packs matrices for so many ranks."""
    asked = [{"arguments": case.words(), "world": case.layout.world} for case in cases]
    (folder / "cases.json").write_text(json.dumps({"cases": asked, "matrices": matrices}))
    command = [sys.executable, RANK_SCRIPTS / "accepted_layouts.py", folder / "cases.json", folder / "results.json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(launch.__file__).parents[1]), "MCORE_CKPT_EXT": "0"}
    done = subprocess.run(
        [*command, *([checkout] if checkout else [])], env=environment, timeout=500, check=False, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads((folder / "results.json").read_text())
    assert parse_version(answer["version"]) == checkouts.release_of(checkout is not None)
    return answer


def judged(cases: Sequence[Case], checkout: str | None, folder: Path) -> list[dict[str, Any]]:
    """What genuine Megatron makes of each case."""
    results: list[dict[str, Any]] = answers_of(cases, checkout, folder)["results"]
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
        for name, part in parts_of(model_space_name(local, 0, 0, job), tuple(shape), 1, job).items():
            layer, _ = split_layer(name)
            place = layer.number if layer else (-1 if name.startswith("embedding.") else place_after_layers(name, job))
            tokens = is_in_vocabulary(name)
            whole = (job.vocab_size, *part[1:]) if tokens else part
            cut = newest_cuts({name: part}, job)(name)
            parameters.append(Parameter(name, whole, 2, place, cut, parse(name).expert, tokens, 12, 12))
    rows = PaddedRows(job.vocab_size, 0, job.make_vocab_size_divisible_by)
    return job, ModelTable(parameters, job.num_layers, copies=embedding_copies(job), padded_rows=rows)


def some_matrices() -> list[Matrices]:
    """Matrices of several sizes, and the ranks to pack them for."""
    dice = random.Random(SEED)
    sides = [8, 32, 64, 96, 100, 128, 130]
    return [
        (
            [[dice.choice(sides), dice.choice(sides)] for _ in range(dice.choice([1, 3, 10, 60]))],
            dice.choice([1, 2, 3, 8]),
        )
        for _ in range(60)
    ]


def check_packing(genuine: Sequence[tuple[list[int], int] | None], rule: LayerWise) -> None:
    """A layer-wise optimizer keeps each matrix where the plan says, in shards of the same size."""
    for (shapes, ranks), found in zip(some_matrices(), genuine, strict=True):
        rows, columns = np.array(shapes).T
        packing = pack(rows, columns, ranks, rule)
        assert found is None or found == [packing.shard_of.tolist(), packing.shard_size]


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
            data, context = dice.choice([1, 2, 3, 4]), dice.choice([*[1] * 6, 2, 2, 3, 4])
            split = dice.choice([{}, {}, {}, {}, *_splits(dice, job.num_layers or 0, pipeline)])
            if "hybrid-layer-pattern" in MODELS[model]:  # the pattern names the stages
                virtual, split = max(SEGMENTS // pipeline, 1) if SEGMENTS % pipeline == 0 else 1, {}
            elif model.startswith("hybrid") and "hybrid in segments" not in models and "loss" in str(split):
                split = {}  # up to 0.16, Megatron does not check that, and leaves layers out
            world = tensor * pipeline * context * data + dice.choice([0] * 12 + [1])
            data = max(1, world // (tensor * pipeline * context))
            layout = plain_layout(
                tensor=tensor, pipeline=pipeline, virtual_pipeline=virtual if pipeline > 1 else 1, expert=expert,
                expert_tensor=expert_tensor, context=context, data=data, world=world,
            )  # fmt: skip
            micro = dice.choice([1, 2])
            implementation = dice.choice(["local", *["transformer_engine"] * 4]) if context > 1 else "local"
            yield Case(model, layout, split, micro, dice.choice([*[data * micro * 4] * 5, 8]), implementation)


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
    job = job.replace(transformer_impl=case.implementation)
    split = applied_split(job, case.split, case.layout.pipeline, case.layout.virtual_pipeline)
    return Choice(job, table, case.layout, split, case.micro_batch, case.global_batch, version)


def check_stages(case: Case, choice: Choice, result: Mapping[str, Any]) -> None:
    """The elements on the first rank of each pipeline stage are those of the genuine model."""
    layout = case.layout
    assert choice.split is not None
    held = choice.table.stages(choice.split.ranges, layout.tensor, layout.expert_tensor, layout.expert)
    genuine = [sum(prod(shape) for chunk in stage for _, shape in chunk) for stage in result["stages"]]
    assert [stage.dense.elements + stage.experts.elements for stage in held] == genuine, case


@pytest.fixture(scope="module", params=checkouts.EITHER)
def release(request: pytest.FixtureRequest) -> tuple[Version, str | None]:
    """A release's number, and the folder that it is imported from; None for the installed one."""
    return checkouts.release_of(request.param), os.environ[checkouts.VARIABLE] if request.param else None


@pytest.fixture(scope="module")
def models(
    release: tuple[Version, str | None], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[JobArguments, ModelTable]]:
    """Every model, by its name."""
    # Since 0.20, layers of multi-token prediction cannot be built where Transformer Engine is not installed.
    names = [model for model in MODELS if release[0] < (0, 20) or not model.startswith("predicting")]
    names.remove("hybrid in segments")
    cases = [Case(model, plain_layout(), {}, 1, 8) for model in names]
    answers = answers_of(cases, release[1], tmp_path_factory.mktemp("models"), some_matrices())
    check_packing(
        answers["packed"], LayerWise.PACKED_BY_SIZE if release[0] < (0, 20) else LayerWise.PACKED_BY_COMPUTATION
    )
    assert not [result for result in answers["results"] if "error" in result]
    found = {case.model: table_of(result) for case, result in zip(cases, answers["results"], strict=True)}
    if release[0] >= (0, 17):  # before, a pattern named no segments
        job, table = found["hybrid"]
        found["hybrid in segments"] = job.replace(hybrid_layer_pattern="M*|M-|M*|M-"), table
    return found


def test_valid_layouts_are_those_that_megatron_builds(
    release: tuple[Version, str | None], models: dict[str, tuple[JobArguments, ModelTable]], tmp_path: Path
) -> None:
    """Of more than 500 random pairs of a model and a layout, exactly those are valid that genuine Megatron builds."""
    cases = list(random_cases({name: job for name, (job, _) in models.items()}))
    results = judged(cases, release[1], tmp_path)
    differing, accepted = [], 0
    for case, result in zip(cases, results, strict=True):
        choice = choice_of(case, *models[case.model], release[0])
        broken = [one for one in violations(choice) if AT_RUN_TIME.get(one[0], "in no reason") not in one[1]]
        if bool(broken) != ("error" in result):
            differing.append((case, broken, result.get("error")))
        elif not broken:
            accepted += 1
            check_stages(case, choice, result)
    assert not differing, f"{len(differing)}: {differing[:5]}"
    assert len(cases) == PAIRS * len(models) and accepted > 100


def test_megatron_builds_every_listed_layout(
    release: tuple[Version, str | None], models: dict[str, tuple[JobArguments, ModelTable]], tmp_path: Path
) -> None:
    """Genuine Megatron builds every layout that is listed, and its stages hold what the plan says."""
    dice = random.Random(SEED)
    cases, choices = [], []
    for name, (job, table) in models.items():
        for gpus, implementation in ((8, "local"), (12, "transformer_engine"), (24, "local")):
            wish = SearchRequest(gpus, 8, release[0])
            old = replace(plain_layout(), data=gpus, world=gpus)
            job = job.replace(transformer_impl=implementation)
            found = search(job, table, old, wish, Buffers(4)).found
            for one in dice.sample(found, min(5, len(found))):
                choice = one.choice
                split = {k: v for k, v in dict(choice.split.arguments).items() if v} if choice.split else {}
                batches = choice.micro_batch, choice.global_batch
                cases.append(Case(name, choice.layout, split, *batches, implementation))
                choices.append(choice)
    results = judged(cases, release[1], tmp_path)
    refused = [(case, result["error"]) for case, result in zip(cases, results, strict=True) if "error" in result]
    assert not refused, f"{len(refused)}: {refused[:5]}"
    for case, choice, result in zip(cases, choices, results, strict=True):
        check_stages(case, choice, result)
    assert any(case.split for case in cases) and any(case.layout.virtual_pipeline > 1 for case in cases)
    assert any(case.layout.context > 1 and case.model.startswith("hybrid") for case in cases)
