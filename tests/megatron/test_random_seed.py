"""Test the seeds of random states that a checkpoint lacks; `tests/jobs/test_random_states.py` has them in jobs."""

from __future__ import annotations

from argparse import Namespace
from itertools import product
from typing import Any

import pytest

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.random_seed import Seeding, has_other_grid, seed_again, seed_at, wrap_set_random_seed
from mcore_ckpt_ext.patching.singletons import PROCESS

_VARIABLE = "MCORE_CKPT_EXT_RANDOM_STATES"


def _arguments(**more: Any) -> Namespace:
    return Namespace(**{"seed": 1234, "no_load_rng": False, **more})


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of a function like Megatron's, which was called once."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(PROCESS.one(Seeding), "repeat", None)
    wrap_set_random_seed(lambda *positional, **keywords: calls.append((*positional, keywords)))(1234, False, te=True)
    return calls


def test_the_call_of_the_start_is_repeated_with_another_seed(seeded: list[tuple[Any, ...]]) -> None:
    assert seed_again(_arguments(), 4)
    assert seeded == [(1234, False, {"te": True}), (seed_at(1234, 4), False, {"te": True})]


def test_stock_and_no_load_rng_leave_all_as_it_is(
    seeded: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not seed_again(_arguments(no_load_rng=True), 4)
    assert not seed_again(_arguments(ckpt_ext_random_states="stock"), 4)
    monkeypatch.setenv(_VARIABLE, "stock")
    assert not seed_again(_arguments(), 4)
    assert seed_again(_arguments(ckpt_ext_random_states="iteration"), 4), "the flag takes precedence"
    monkeypatch.setattr(PROCESS.one(Seeding), "repeat", None)
    assert not seed_again(_arguments(ckpt_ext_random_states="iteration"), 4)
    assert len(seeded) == 2


def test_seeds_are_valid_for_all_generators_and_differ() -> None:
    seeds = {seed_at(seed, iteration) for seed, iteration in product((1, 1234, 2**31), range(0, 100_000, 100))}
    assert len(seeds) == 3000
    assert min(seeds) > 0
    assert max(seeds) <= 2**31, "numpy accepts 32 bits, and Megatron adds the numbers of ranks"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"tensor_model_parallel_size": 1}, True),
        ({"pipeline_model_parallel_size": 4}, True),
        ({"world_size": 16, "data_parallel_size": 4}, False),
    ],
)
def test_only_tensor_and_pipeline_sizes_are_the_grid(changes: dict[str, int], expected: bool) -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "world_size": 8}
    written = JobArguments.of({**sizes, "data_parallel_size": 2})
    assert has_other_grid(written, written.replace(**changes)) is expected
    assert not has_other_grid(JobArguments.of({}, is_complete=False), written)
