"""Test each check of the load policy with the fewest facts that make it apply."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain
from mcore_ckpt_ext.megatron.load_facts import LoadFacts, Loop
from mcore_ckpt_ext.megatron.policy import CHECKS, WITHOUT_RANDOM_STATES, Check, LoadDecision, decide

IDENTITY = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}


def distributed(
    inner: Any = None,
    parameters: tuple[torch.Tensor, ...] = (),
    optimizer_state_keys: tuple[str, ...] | None = None,
    **config: Any,
) -> Chain:
    inner = SimpleNamespace(param_groups=[dict(IDENTITY)]) if inner is None else inner
    child = SimpleNamespace(
        optimizer=inner, config=SimpleNamespace(**config), gbuf_ranges=[],
        model_param_group_index_map=dict.fromkeys(parameters), optimizer_state_keys=optimizer_state_keys,
    )  # fmt: skip
    return Chain([child], [], [])


ADAM = {**IDENTITY, "betas": (0.9, 0.95), "eps": 1e-8}


def stated(**arguments: Any) -> JobArguments:
    return JobArguments.of(arguments, is_complete=False)


def model(**arguments: Any) -> JobArguments:
    return JobArguments.of({"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, **arguments})


def whole(inner: Any, masters: Sequence[Sequence[int]] = (), layer_wise: Any = None) -> Chain:
    return Chain([], [(SimpleNamespace(optimizer=inner, fp32_from_float16_groups=masters), layer_wise)], [])


WEIGHT = torch.nn.Parameter(torch.zeros(2, dtype=torch.float32))
HALF = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
IN_PLACE = {"optimizer_format": "dp_reshardable"}
FACTS: Mapping[str, dict[str, Any]] = {
    "files": {"loop": Loop.LEGACY, "blockers": ["pipeline_model_parallel_size"]},
    "format of Megatron-FSDP": {"loop": Loop.MEGATRON_FSDP, "is_own_format": False},
    "optimizer of torch's FSDP": {"loop": Loop.TORCH_FSDP},
    "optimizer arguments": {"differing_arguments": lambda: ["optimizer_cpu_offload"]},
    "learning rates": {"written": stated(lr=1e-3), "running": stated(lr=5e-4)},
    "bounds of single groups": {
        "version": (0, 20),
        "running": stated(override_opt_param_scheduler=True, lr=1e-3),
        "chain": distributed(SimpleNamespace(param_groups=[{"max_lr": 5e-4}])),
    },
    "new tokens": {"has_new_tokens": True},
    "another model": {
        "optimizer_format": "fully_reshardable",
        "written": model(qk_layernorm=True),
        "running": model(qk_layernorm=False),
    },
    "layer-wise files": {"loop": Loop.LEGACY, "has_own_files": lambda: False},
    "distributed or not": {**IN_PLACE, "chain": whole(torch.optim.Adam([HALF]))},
    "number of groups": {"chain": whole(torch.optim.Adam([HALF])), "has_as_many_groups": lambda: False},
    "empty groups": {"chain": whole(torch.optim.Adam([HALF]), [[], [1], [2]])},
    "number of optimizers": {"optimizer_counts": (2, 1)},
    "SGD": {"chain": whole(torch.optim.SGD([HALF], lr=1.0))},
    "CPU offloading": {"chain": distributed(SimpleNamespace(sub_optimizers=[], param_groups=[]))},
    "moments of another optimizer": {
        "chain": distributed(SimpleNamespace(param_groups=[ADAM]), optimizer_state_keys=("exp_avg",))
    },
    "precision-aware, in place": {
        **IN_PLACE, "version": (0, 16), "chain": distributed(use_precision_aware_optimizer=True)
    },
    "remainders as fp32": {
        "optimizer_format": "fully_reshardable",
        "chain": distributed(SimpleNamespace(store_param_remainders=True, param_groups=[]), bf16=True),
    },
    "torch's Adam": {"chain": distributed(torch.optim.AdamW([HALF]))},
    "fp32 parameters, in place": {**IN_PLACE, "chain": distributed(parameters=(WEIGHT,))},
    "layout": {**IN_PLACE, "is_moved": True},
    "shifted parameters": {"loop": Loop.CORE, "is_shifted": lambda: True},
    "group settings": {"version": (0, 16), "stored_groups": lambda: [{"wd_mult": 1.0}]},
    "groups with rates of their own": {
        "version": (0, 16), "stored_groups": lambda: [{**IDENTITY, "max_lr": 1e-3}, {**IDENTITY, "max_lr": 5e-4}]
    },
    "parameter groups": {"stored_groups": lambda: [{**IDENTITY, "wd_mult": 0.0}], "chain": distributed()},
    "before the first step": {**IN_PLACE, "is_before_first_step": lambda: True},
    "settings of fused Adam": {
        "stored_groups": lambda: [dict(IDENTITY)],
        "chain": distributed(SimpleNamespace(param_groups=[dict(IDENTITY)], defaults={"bias_correction": True})),
    },
    "order in the buffers": {**IN_PLACE, "is_packed_otherwise": True},
}  # fmt: skip


def facts_of(name: str) -> LoadFacts:
    return LoadFacts(**{"loop": Loop.MEGATRON, "version": (0, 19), **FACTS[name]})


def test_every_check_has_its_facts() -> None:
    assert [check.name for check in CHECKS] == list(FACTS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_decides_by_itself(check: Check) -> None:
    facts = facts_of(check.name)
    decision = decide(facts)
    assert (decision.reason, decision.is_stock) == (check.name, False)
    assert check.name in str(decision)
    assert check.source in str(decision)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_has_a_source_and_the_releases_that_were_read(check: Check) -> None:
    assert check.consequence
    assert re.search(r"\w/\w", check.source)
    assert re.search(r"\b0\.\d+\.\d+\b|development head of \w+ \d{4}", check.source)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_concerns_its_loops_and_versions_alone(check: Check) -> None:
    facts = facts_of(check.name)
    others = [loop for loop in Loop if loop not in check.loops]
    assert not any(check.concerns(replace(facts, loop=loop)) for loop in others)
    if check.requires is not None:
        assert check.requires.since is not None
        assert not check.concerns(replace(facts, version=(0, check.requires.since.minor - 1)))
    if check.excludes is not None:
        assert check.excludes.since is not None
        assert not check.concerns(replace(facts, version=check.excludes.since))


def test_stock_fails_to_fill_fp32_parameters_from_files_of_ranks() -> None:
    """Seen with 0.19.2, TP1 x PP1 x DP2: "a view of a leaf Variable that requires grad"."""
    filled = [decide(LoadFacts(Loop.LEGACY, (0, 19), chain=distributed(parameters=(one,)))) for one in (WEIGHT, HALF)]
    assert [decision.reason for decision in filled] == ["fp32 parameters, in place", None]


def test_nothing_that_speaks_against_stock() -> None:
    """What has been read shows up in the text, so that a user sees what has been ruled out."""
    decision = decide(LoadFacts(Loop.CORE, (0, 19), "dp_reshardable", chain=distributed()))
    assert decision.is_stock
    assert str(decision).startswith("stock Megatron loads the optimizer (dp_reshardable) in a loop on Megatron Core")
    assert "shifted parameters" in str(decision)


def test_the_first_check_that_applies_decides() -> None:
    facts = replace(facts_of("layout"), differing_arguments=lambda: ["optimizer"])
    assert decide(facts).reason == "optimizer arguments"


def test_ranks_can_exchange_a_decision() -> None:
    decision = decide(facts_of("layout"))
    assert pickle.loads(pickle.dumps(decision)) == decision == LoadDecision(
        Loop.MEGATRON, "dp_reshardable", is_moved=True, reason="layout"
    )  # fmt: skip


def test_a_decision_names_the_random_states_that_are_left_out() -> None:
    decision = replace(decide(LoadFacts(Loop.MEGATRON, (0, 19), "dp_reshardable")), omits_random_states=True)
    assert WITHOUT_RANDOM_STATES in str(decision)


def test_groups_with_values_that_cannot_be_hashed_are_compared() -> None:
    """As a damaged file may have them."""
    facts = facts_of("groups with rates of their own")
    alike = [{**IDENTITY, "max_lr": [1e-3]}, {**IDENTITY, "max_lr": [1e-3]}]
    check = next(check for check in CHECKS if check.name == "groups with rates of their own")
    assert check.concerns(replace(facts, stored_groups=lambda: [*alike, {**IDENTITY, "max_lr": [5e-4]}]))
    assert not check.concerns(replace(facts, stored_groups=lambda: alike))


def test_empty_groups_matter_before_two_others() -> None:
    """The last group is loaded in place and not overwritten. A layer-wise optimizer wraps its empty groups."""
    adam = torch.optim.Adam([HALF])
    for masters in ([[1], []], [[1], [2]], [[], [1]], [[1], [], [2]]):
        assert decide(LoadFacts(Loop.MEGATRON, (0, 19), chain=whole(adam, masters))).is_stock
    masters = [[1], [], [2], [3]]
    assert not decide(LoadFacts(Loop.MEGATRON, (0, 19), chain=whole(adam, masters))).is_stock
    assert decide(LoadFacts(Loop.MEGATRON, (0, 19), chain=whole(adam, masters, layer_wise=object()))).is_stock
