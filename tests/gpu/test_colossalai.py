"""Test GeminiDDP of genuine ColossalAI on real GPUs, with its compiled kernels and NCCL."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext.devices import accelerator_type, device_module
from mcore_ckpt_ext.selftest.launcher import all_on_this_node, log_of, start

PROGRAM = Path(__file__).parents[1] / "colossalai" / "gpu_rank.py"
PATIENCE = 120
MEMORY = "memory"
# The module, its placement, the compute dtype, and where its masters lie.
RESUMES = (
    ("TinyGPT", "static", "bfloat16", "cuda"),
    ("TinyGPT", "optimizer offload", "bfloat16", "cpu"),
    ("TinyGPT", "auto", "bfloat16", "cpu"),
    ("TinyGPT", "static", "float16", "cuda"),
    ("TinyGPT", "optimizer offload", "float16", "cpu"),
    ("TinyGPT", "full offload", "bfloat16", "cpu"),
    ("Everything", "static", "bfloat16", "cuda"),
    ("gpt2", "static", "bfloat16", "cuda"),
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, at_most: Callable[[float], float]) -> Callable[[str], list[Any]]:
    """Run all cases in one launch; return what its ranks found in a case, or fail with the error of one."""
    if find_spec("colossalai") is None:
        pytest.skip("ColossalAI is not installed")
    ranks = device_module(str(accelerator_type())).device_count()
    folder = tmp_path_factory.mktemp("colossalai")
    cases = {**{", ".join(row[:3]): row[:3] for row in RESUMES}, MEMORY: ()}
    order = folder / "order.json"
    order.write_text(json.dumps(cases))
    ended = start(
        all_on_this_node(ranks), order, progress=lambda: len(list(folder.iterdir())), patience=at_most(PATIENCE),
        program=(sys.executable, str(PROGRAM)),
    )  # fmt: skip

    def found(case: str) -> list[Any]:
        paths = [folder / f"{case}, rank {rank}" for rank in range(ranks)]
        outcomes = [json.loads(path.read_text()) for path in paths if path.exists()]
        errors = [one["error"] for one in outcomes if one["error"]]
        logs = (log_of(folder, rank) for rank in range(ranks))
        assert not errors, "\n".join(errors)
        assert len(outcomes) == ranks, f"{ended}\n" + "\n".join(log.read_text() for log in logs if log.exists())
        return [one["found"] for one in outcomes]

    return found


@pytest.mark.parametrize(("build", "placement", "dtype", "device"), RESUMES)
def test_a_resume_is_exact(
    build: str, placement: str, dtype: str, device: str, outcome: Callable[[str], list[Any]]
) -> None:
    """State dict, strict loading and the optimizer's state, as `tests/colossalai/promises.py` has them."""
    assert set(outcome(f"{build}, {placement}, {dtype}")) == {device}


def test_saving_and_loading_need_little_memory_of_the_device(
    outcome: Callable[[str], list[Any]], figure: Callable[[str], None]
) -> None:
    found = outcome(MEMORY)
    assert found[0]["to the GPU"] > 0, "nothing was measured"
    for rank, peaks in enumerate(found):
        figure(f"rank {rank}: {', '.join(f'{name} {peak:.1f} MiB' for name, peak in peaks.items())}")
