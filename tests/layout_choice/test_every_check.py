"""Test that somebody has looked at every check of Megatron that depends on the layout.

The checks are read from the sources of the installed release: each `assert` and each `raise` of the functions in
`PLACES` whose conditions name a size. `tests/data/layout_checks.json` says of each which rule it is, or why it is none.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_ckpt_ext.layout_choice.option_rules import OPTION_RULES, OptionRule
from mcore_ckpt_ext.layout_choice.rules import RULES
from tests.harness.layout_search import found_for

ANSWERS = Path(__file__).parents[1] / "data" / "layout_checks.json"
PLACES = {
    "training/arguments.py": ("validate_args",),
    "core/transformer/transformer_config.py": ("__post_init__",),
    "core/model_parallel_config.py": ("__post_init__",),
    "core/parallel_state.py": ("initialize_model_parallel",),
    "core/optimizer/distrib_optimizer.py": ("__init__",),
    "core/optimizer/layer_wise_optimizer.py": ("__init__",),
    "core/optimizer/optimizer_config.py": ("__post_init__",),
    "core/distributed/distributed_data_parallel.py": ("__init__",),
    "core/num_microbatches_calculator.py": ("__init__", "_build_num_microbatches_calculator"),
    "core/pipeline_parallel/schedules.py": (
        "forward_backward_pipelining_with_interleaving", "forward_backward_pipelining_without_interleaving",
        "forward_backward_no_pipelining",
    ),
}  # fmt: skip
_SIZES = re.compile(
    "parallel_size|world_size|microbatch|micro_batch|optimizer_instances|parallel_layout|pipeline_num_layers|"
    "virtual_stages|num_layers_per_virtual|account_for|data_parallel|pp_size|dp_size"
)


def checks() -> Iterator[str]:
    """Yield every check: the file, and the conditions under which it fails or that must hold."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parents[1]
    for path, names in PLACES.items():
        for function in ast.walk(ast.parse((root / path).read_text())):
            if isinstance(function, ast.FunctionDef) and function.name in names:
                for conditions in _checks_in(function, ()):
                    if _SIZES.search(" ".join(conditions)):
                        yield f"{path}: {' | '.join(conditions[-2:])}"


def _checks_in(node: ast.AST, conditions: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assert):
            yield (*conditions, f"assert {ast.unparse(child.test)}")
        elif isinstance(child, ast.Raise):
            yield (*conditions, "raise")
        elif isinstance(child, ast.If):
            test = ast.unparse(child.test)
            yield from _checks_in(ast.Module(child.body, []), (*conditions, test))
            yield from _checks_in(ast.Module(child.orelse, []), (*conditions, f"not ({test})"))
        elif not isinstance(child, (ast.FunctionDef, ast.Lambda)):
            yield from _checks_in(child, conditions)


def test_somebody_has_looked_at_every_check() -> None:
    """A new one is either a rule, or there is a reason why a plan does not need it."""
    answers = json.loads(ANSWERS.read_text())
    found = set(checks())
    assert len(found) > 60
    assert found - answers.keys() == set(), "say in layout_checks.json which rule it is, or why it is none"
    assert answers.keys() - found == set(), "these are no longer in the installed release"
    names = {name for name, _ in RULES}
    unknown = {answer for answer in answers.values() if answer not in names and not answer.startswith("not checked: ")}
    assert not unknown


@pytest.mark.parametrize("rule", OPTION_RULES, ids=[rule.argument for rule in OPTION_RULES])
def test_options_exclude_layouts(rule: OptionRule) -> None:
    """Each row excludes some layouts of 8 GPUs and leaves others; without the option none is excluded."""
    found = found_for(8, **{rule.argument: True})
    assert found.found and all(rule.allows(one.choice.layout) for one in found.found)
    assert found.excluded["options of the job"]
    assert "options of the job" not in found_for(8).excluded


def test_other_options_exclude_layouts() -> None:
    """Hierarchical sizes are CP; experts with biases are not divided; sparse attention gathers."""
    contexts = {one.choice.layout.context for one in found_for(8, hierarchical_context_parallel_sizes=[2, 2]).found}
    assert contexts == {4}
    experts = {"num_experts": 8, "moe_ffn_hidden_size": 8, "add_bias_linear": True, "expert_tensor_parallel_size": 1}
    biased = found_for(8, **experts)
    assert {one.choice.layout.expert_tensor for one in biased.found} == {1}
    assert biased.excluded["biases of experts"] and "options of the job" not in biased.excluded
    sparse = found_for(8, experimental_attention_variant="dsa", cp_comm_type=["p2p"]).found
    assert {one.choice.layout.context for one in sparse} == {1}


def test_the_batch_of_evaluation_excludes_layouts() -> None:
    """One that the job states: 8 samples in micro batches of 2 leave DP 1, 2 and 4; that of training excludes none."""
    stated = found_for(12, eval_global_batch_size=8, eval_micro_batch_size=2)
    assert {one.choice.layout.data for one in stated.found} == {1, 2, 4} and stated.excluded["evaluation batch"]
    derived = found_for(12, eval_global_batch_size=96, eval_micro_batch_size=1)
    assert 12 in {one.choice.layout.data for one in derived.found} and "evaluation batch" not in derived.excluded
