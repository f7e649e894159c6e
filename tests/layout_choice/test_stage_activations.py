"""Test the estimate of activations: formulas of the paper, genuine schedules, the genuine loss, published figures."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.activation_options import ActivationOptions
from mcore_ckpt_ext.layout_choice.activations import LayerTerms, Shares, terms_of
from mcore_ckpt_ext.layout_choice.model_sizes import ModelSizes, Part
from mcore_ckpt_ext.layout_choice.options import Recomputation
from mcore_ckpt_ext.layout_choice.padded_rows import PaddedRows
from mcore_ckpt_ext.layout_choice.stage_activations import chunks_in_flight
from tests.harness.layout_search import found_for

REPOSITORY = Path(__file__).parents[2]
FACTS = REPOSITORY / "tests/data/published_layouts.json"
SIZES = {"num_layers": 1, "hidden_size": 96, "num_attention_heads": 8, "seq_length": 64, "hidden_dropout": 0.1}


def layer(tensor: int, residual: int, **more: Any) -> tuple[LayerTerms, LayerTerms]:
    """The terms of a layer as in the paper: no grouped queries, an MLP of 4 h, dropout."""
    recomputation = Recomputation(more.pop("recompute_granularity", "none"))
    job = JobArguments.of(SIZES | more)
    sizes, options = ModelSizes.of(job), ActivationOptions.of(job, recomputation)
    shares = Shares(64, 2, tensor, tensor, residual)
    return terms_of(Part.ATTENTION, sizes, options, shares), terms_of(Part.FEED_FORWARD, sizes, options, shares)


def kept(parts: tuple[LayerTerms, LayerTerms]) -> float:
    """The bytes of a layer, without the statistics of flash attention, which the paper does not count."""
    return sum(part.kept for part in parts) - parts[0].terms["softmax statistics"]


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_a_layer_follows_the_paper(tensor: int) -> None:
    """The formulas of arXiv:2205.05198, table 2: fused attention never stores the scores."""
    unit, heads = 64 * 2 * 96, 8
    assert kept(layer(tensor, 1)) == unit * (10 + 24 / tensor)
    assert kept(layer(tensor, tensor)) == unit * 34 / tensor
    scores = 5 * heads * 64 * 64 * 2 / tensor
    assert kept(layer(tensor, tensor, attention_backend="unfused")) == unit * 34 / tensor + scores
    assert kept(layer(tensor, tensor, attention_backend="auto")) == unit * 34 / tensor
    recomputed = layer(tensor, tensor, transformer_impl="local", recompute_granularity="selective")
    assert kept(recomputed) == unit * 34 / tensor and recomputed[0].recomputed == scores


def test_rotated_queries_and_keys_are_kept_instead_of_the_projection() -> None:
    """Transformer Engine copies the values, of which the projection would otherwise be kept as a whole."""
    unit = 64 * 2 * 96
    rotary = {"position_embedding_type": "rope"}
    assert kept(layer(1, 1, **rotary)) == unit * 34
    normalized = layer(1, 1, qk_layernorm=True, **rotary)
    assert kept(normalized) == unit * (34 + 4)
    for holds_projection in ({"transformer_impl": "local", "recompute_granularity": "selective"},
                             {"recompute_granularity": "selective"}, {"attention_output_gate": True}):  # fmt: skip
        more = 4 if "attention_output_gate" in holds_projection else 0  # the gates, and a copy that stays
        assert kept(layer(1, 1, **rotary, **holds_projection)) == unit * (34 + 4 + more)


@pytest.mark.parametrize(("fp8", "norm"), [(None, 2), ("hybrid", 1)])
def test_mamba_keeps_its_output_before_and_after_the_gate_and_its_norm(fp8: str | None, norm: int) -> None:
    job = JobArguments.of(SIZES | {"hybrid_layer_pattern": "M", "is_hybrid_model": True, "fp8": fp8})
    sizes = ModelSizes.of(job)
    terms = terms_of(
        Part.MAMBA, sizes, ActivationOptions.of(job, Recomputation.NONE), Shares(64, 2, 1, 1, 1)
    ).terms  # fmt: skip
    tokens = 64 * 2
    assert terms["projection"] == 2 * tokens * sizes.mamba_input
    assert terms["output before and after the gate"] == 2 * 2 * tokens * sizes.mamba_inner > 0
    assert terms["norm of the output"] == norm * tokens * sizes.mamba_inner


def test_modules_that_are_recomputed_keep_nothing() -> None:
    """`--recompute-modules` names what is dropped; without it, only the core of attention is."""
    modules = {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]}
    attention, mlp = layer(2, 2, **modules)
    assert mlp.dropped == {"first projection", "activation", "norm output"}
    assert attention.dropped == {"norm output"}
    assert not any(part.dropped for part in layer(2, 2, recompute_granularity="selective"))


def test_the_fullest_rank_of_a_layer_has_more_tokens_than_the_average() -> None:
    """Unless routing is balanced by force or padded, up to twice as many, or `--moe-expert-capacity-factor` times."""
    model = SIZES | {"num_experts": 8, "moe_ffn_hidden_size": 64}

    def gradient(expert: int, **more: Any) -> float:
        job = JobArguments.of(model | more)
        options = ActivationOptions.of(job, Recomputation.NONE)
        shares = Shares(64, 2, 1, 1, 1, expert)
        return terms_of(Part.EXPERTS, ModelSizes.of(job), options, shares).gradient

    assert gradient(1) == gradient(4, moe_router_force_load_balancing=True) < gradient(4)
    bounded = gradient(4, moe_expert_capacity_factor=1.5)
    assert gradient(1) < bounded < gradient(4) == gradient(4, moe_expert_capacity_factor=3.0)


@pytest.mark.parametrize("group", [4, 5])
@pytest.mark.parametrize(
    ("pipeline", "virtual", "microbatches"), [(1, 1, 3), (4, 1, 2), (4, 1, 9), (4, 3, 8), (4, 2, 20)]
)
def test_micro_batches_in_flight_are_those_of_the_genuine_schedule(
    pipeline: int, virtual: int, microbatches: int, group: int
) -> None:
    """At the first backward pass, every rank has run the forward passes that `schedules.py` says."""
    from megatron.core.pipeline_parallel import schedules

    layout = ParallelLayout.from_arguments(
        JobArguments.of({"pipeline_model_parallel_size": pipeline, "world_size": pipeline})
    )
    layout = replace(layout, virtual_pipeline=virtual)
    for rank in range(pipeline):
        place = _Place(pipeline, rank, virtual if virtual > 1 else None)
        total, _, warmup, _ = schedules.get_pp_rank_microbatches(microbatches, virtual, group, p2p_communicator=place)
        table = schedules.get_schedule_table(microbatches, virtual, group)
        genuine = Counter(chunk for _, chunk in table[: min(warmup + 1, total)])
        flying = chunks_in_flight(layout, rank, microbatches, group)
        assert flying == tuple(genuine[chunk] for chunk in range(virtual))


class _Place:
    """The place of a rank in its pipeline, as `get_pp_rank_microbatches` asks for it."""

    def __init__(self, size: int, rank: int, virtual: int | None) -> None:
        self.pp_group = self
        self._size, self._rank = size, rank
        self.virtual_pipeline_model_parallel_size = virtual

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """The program of `benchmarks/`, which makes the published models."""
    folder = REPOSITORY / "benchmarks"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("published_layouts", folder / "published_layouts.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


ROWS = json.loads(FACTS.read_text())


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_published_setups(row: dict[str, Any], benchmark: ModuleType) -> None:
    """They are listed, fit or not as published, and need the measured memory within 10 %; idle, within 2 %."""
    found = benchmark.result_of(row, ranked=False)
    assert found.fits == (row["outcome"] == "works")
    if found.ratio is not None:
        assert found.ratio == pytest.approx(1, abs=0.1)
    if found.states is not None:
        assert found.memory.static + found.memory.received == pytest.approx(found.states, rel=0.02)


def test_the_loss_needs_what_the_genuine_one_allocates() -> None:
    """Per logit: 2 bytes in bf16 and 4 in fp32, in the forward pass as in the backward pass."""
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    logits = torch.randn(8, 1, 64, dtype=torch.bfloat16)
    wide, _ = VocabParallelCrossEntropy.calculate_logits_max(logits)
    assert wide.dtype is torch.float32
    target = torch.zeros(8, 1, dtype=torch.long)
    mask, _, predicted, total, exponentials = VocabParallelCrossEntropy.calculate_predicted_logits(
        wide, target, wide.amax(-1), 0, 64
    )
    softmax, _ = VocabParallelCrossEntropy.calculate_cross_entropy_loss(exponentials, predicted, total)
    gradient = VocabParallelCrossEntropy.prepare_gradient_calculation_operands(softmax, mask)[3]
    # No copy after the first one: all of it happens in place.
    assert {one.data_ptr() for one in (exponentials, softmax, gradient)} == {wide.data_ptr()}


def test_the_loss_of_transformer_engine_keeps_a_gradient_in_fp32() -> None:
    """Per logit: 2 bytes in bf16 and 4 of the gradient, which each depth of multi-token prediction keeps."""

    def needed(**more: Any) -> tuple[int, int]:
        memory = found_for(1, PaddedRows(8192, 0, 128), cross_entropy_loss_fusion=True, **more).found[0].memory
        return memory.activations, memory.loss

    logits = 64 * 8192
    kept, loss = needed(cross_entropy_fusion_impl="te")
    assert loss == (2 + 4) * logits
    assert needed()[1] == (4 + 4 + 2) * logits
    predicted = needed(cross_entropy_fusion_impl="te", mtp_num_layers=1)[0]
    assert predicted == needed(mtp_num_layers=1)[0] > kept + 4 * logits
