"""The order of layouts for a job that begins: the guidance of Megatron, and one line for virtual stages."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.found_layout import FoundLayout
from mcore_ckpt_ext.layout_choice.order import departure_from_guidance, leaves_node
from mcore_ckpt_ext.layout_choice.search import join_virtual_stages
from tests.harness.layout_search import found_for

EXPERTS = {"num_experts": 16, "moe_ffn_hidden_size": 8, "hidden_dropout": 0.0}


def layouts_of(gpus: int, **more: Any) -> list[ParallelLayout]:
    """The layouts of a job that had none, best first."""
    return [one.choice.layout for one in found_for(gpus, **more).found if one.choice.keeps_batch]


def place(layouts: list[ParallelLayout], **sizes: int) -> int:
    """The place of the first layout with these sizes; others are 1."""
    everything = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1, "virtual_pipeline": 1, **sizes}
    return next(
        n for n, one in enumerate(layouts) if all(getattr(one, name) == size for name, size in everything.items())
    )


def test_as_little_model_parallelism_as_possible() -> None:
    """Without a limit of memory data parallelism alone comes first, and every doubling later."""
    layouts = layouts_of(8)
    assert str(layouts[0]) == "TP1 x PP1 x DP8"
    assert place(layouts, tensor=2) < place(layouts, tensor=4) < place(layouts, tensor=8)
    assert place(layouts, tensor=2) < place(layouts, pipeline=2), "a pipeline idles, tensor parallelism does not"


def test_context_parallelism_is_for_long_sequences() -> None:
    """Up to 8,192 tokens it comes after everything else."""
    assert layouts_of(8)[-1].context > 1
    divided = [one.context > 1 for one in layouts_of(8)]
    assert divided == sorted(divided)
    long = [one.context > 1 for one in layouts_of(8, seq_length=8192)]
    assert long != sorted(long)


def test_experts_are_shared_by_a_node() -> None:
    """EP8 on nodes of 8 GPUs comes first; beyond a node, or with tensor parallelism of experts, it counts."""
    layouts = layouts_of(32, **EXPERTS)
    assert (layouts[0].expert, layouts[0].tensor, layouts[0].pipeline) == (8, 1, 1)
    assert place(layouts, expert=8) < place(layouts, expert=16)
    divided = next(n for n, one in enumerate(layouts) if one.expert_tensor > 1 and one.context == 1)
    assert place(layouts, expert=16) < divided


def test_what_counts_as_model_parallelism() -> None:
    """EP counts by its doublings beyond a node, tensor parallelism of experts by all of them."""
    pins = {"tensor": 2, "pipeline": 1, "context": 1}
    costs = {
        (one.choice.layout.expert, one.choice.layout.expert_tensor): departure_from_guidance(one.choice, 4)[2]
        for one in found_for(32, pins=pins, **EXPERTS).found
    }
    assert costs[4, 1] == 1 and costs[8, 1] == 2 and costs[16, 1] == 3
    assert costs[2, 2] == 2 and costs[4, 2] == 3, "2 x 2 are in a node of four, 4 x 2 are not"


def test_tensor_parallelism_stays_in_a_node() -> None:
    """More than the node has comes last, however little else divides the model."""
    found = found_for(16, num_attention_heads=16).found
    crosses = [departure_from_guidance(one.choice, 8)[:2] for one in found if one.choice.keeps_batch]
    assert crosses == sorted(crosses) and (False, True) in crosses


def test_tensor_parallel_groups_fill_a_node_or_divide_it() -> None:
    """Of eight GPUs six are a group, and two begin the next one, which is on two nodes."""
    layouts = layouts_of(48, num_attention_heads=48)
    assert place(layouts, tensor=8) < place(layouts, tensor=6)


def test_a_job_on_a_part_of_a_node_is_in_it() -> None:
    """Six GPUs of a node of eight are one group or two of three: none leaves the node."""
    (one, *_) = layouts_of(6, num_attention_heads=6, pins={"tensor": 1})
    for size in (3, 6):
        (divided, *_) = layouts_of(6, num_attention_heads=6, pins={"tensor": size})
        assert not leaves_node(divided, one, 8) and leaves_node(divided, one, 4)


def test_a_job_goes_on_in_its_nodes() -> None:
    """Groups that left a node before are no reason to change; new ones that would are."""
    (wide, *_) = layouts_of(16, num_experts=16, moe_ffn_hidden_size=8, pins={"expert": 16, "expert_tensor": 1})
    (narrow, *_) = layouts_of(16, num_experts=16, moe_ffn_hidden_size=8, pins={"expert": 8, "expert_tensor": 1})
    assert leaves_node(wide, narrow, 8) and not leaves_node(wide, wide, 8) and not leaves_node(narrow, wide, 8)


def test_virtual_stages_are_one_line() -> None:
    """The fewest that idle as little stand for all that are as acceptable."""
    found = found_for(4, pins={"pipeline": 4, "tensor": 1, "context": 1}).found
    ((first, others),) = join_virtual_stages(found)
    assert first is found[0]
    assert {first.choice.layout.virtual_pipeline, *others} == {1, 2}


@pytest.mark.parametrize(("layers", "most"), [(48, 24), (46, 23), (62, 31), (61, 16)])
def test_many_virtual_stages_have_equal_layers(layers: int, most: int) -> None:
    """A published job has one layer in each of 20 stages (Llama 3 70B, TP1 x PP4)."""
    found: list[FoundLayout] = found_for(2, num_layers=layers, pins={"pipeline": 2, "tensor": 1}).found
    assert max(one.choice.layout.virtual_pipeline for one in found) == most
