"""Test the layers of hybrid models: of a pattern, and of the ratios that models before 0.17 may have instead."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_ckpt_ext.job.hybrid_pattern import is_hybrid, layer_pattern
from mcore_ckpt_ext.job.job_arguments import JobArguments

# By genuine `allocate_layers` of core_v0.16.1.
ALLOCATED = [
    (4, 0.25, 0.25, "MM*-"),
    (8, 0.25, 0.0, "MM*MM*MM"),
    (24, 0.08, 0.5, "M-M-M--*M-M-M-M-*M--M-M-"),
    (56, 0.08, 0.5, "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"),
    (6, 0.0, 0.5, "M-M-M-"),
]
PATTERNS: list[tuple[dict[str, Any], str]] = [
    ({"hybrid_layer_pattern": "M*|M-/*-"}, "M*|M-"),
    ({"hybrid_override_pattern": "M*-", "hybrid_attention_ratio": 0.34}, "M*-"),
    ({}, ""),
    ({"hybrid_attention_ratio": 0.0, "hybrid_mlp_ratio": 0.0}, ""),
    ({"hybrid_attention_ratio": 0.9, "hybrid_mlp_ratio": 0.9}, ""),
    ({"hybrid_attention_ratio": "0.5", "hybrid_mlp_ratio": None}, ""),
]


@pytest.mark.parametrize(("layers", "attention", "feed_forward", "expected"), ALLOCATED)
def test_ratios(layers: int, attention: float, feed_forward: float, expected: str) -> None:
    arguments = {"num_layers": layers, "hybrid_attention_ratio": attention, "hybrid_mlp_ratio": feed_forward}
    assert layer_pattern(JobArguments.of(arguments)) == expected


@pytest.mark.parametrize(("arguments", "expected"), PATTERNS)
def test_patterns(arguments: dict[str, Any], expected: str) -> None:
    job = JobArguments.of({"num_layers": 4, **arguments})
    assert (layer_pattern(job), is_hybrid(job)) == (expected, bool(expected))
