"""What `convert` wrote, in genuine Megatron-LM without this package: it resumes, and every live element is the truth's.

The default runs use megatron-core 0.19.2; with MEGATRON_LM_PATH, a checkout resumes torch_dist and legacy files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt_ext
from tests.conftest import fixture_named
from tests.test_formats_online import LLAMA, experts
from tests.test_legacy_online import LEGACY, VARIABLE, VIRTUAL, Layout, assert_equal, run, said, with_checkout

GROUPED_QUERIES = [*LLAMA, "--group-query-attention", "--num-query-groups", "2"]
NO_RANDOM_STATE = ["--no-load-rng"]


def resume(
    fixture: str, layout: Layout, folder: Path, more: list[str], *, checkout: bool = False, **options: Any
) -> None:
    source = fixture_named(fixture)
    mcore_ckpt_ext.convert(source.run, folder / "run", **options)
    _, tensor, _ = layout
    rows = source.job["args"]["padded_vocab_size"]
    vocabulary = ["--make-vocab-size-divisible-by", str(rows // tensor)]
    result = run(folder, layout, [*vocabulary, *more], load=folder / "run", checkout=checkout, plugin=False)
    assert result.returncode == 0, result.output[-6000:]
    assert said(result, "[mcore_ckpt_ext]") == 0
    # It went on from the stored iteration; a loader that found nothing would begin with the first.
    assert said(result, "iteration        5/       8") == 1
    assert_equal(source.truth, folder)


@pytest.mark.parametrize(
    ("fixture", "layout", "more"),
    [
        ("p10", (8, 2, 2), []),
        ("p02", (2, 1, 1), GROUPED_QUERIES),
        ("p08b", (4, 1, 4), []),
        ("p09", (8, 2, 2), experts(2, "--sequence-parallel")),
    ],
)
def test_torch_dist_in_stock_megatron(fixture: str, layout: Layout, more: list[str], tmp_path: Path) -> None:
    """Written from dp_reshardable of 0.19 and 0.16, from legacy files, and from experts of two ranks."""
    resume(fixture, layout, tmp_path, more, to="torch_dist", megatron_version="0.19.2")


@with_checkout
@pytest.mark.parametrize(
    ("fixture", "layout", "more"), [("p10", (8, 2, 2), []), ("p01", (2, 1, 1), []), ("p08b", (4, 4, 1), [])]
)
def test_torch_dist_in_a_checkout(fixture: str, layout: Layout, more: list[str], tmp_path: Path) -> None:
    resume(fixture, layout, tmp_path, more, checkout=True, to="torch_dist", megatron_version=checkout_version())


@with_checkout
@pytest.mark.parametrize(
    ("fixture", "layout", "more", "sizes"),
    [
        ("p01", (8, 2, 2), NO_RANDOM_STATE, {}),
        ("p10", (4, 1, 2), NO_RANDOM_STATE, {}),
        ("p03", (4, 1, 2), VIRTUAL, {"virtual_pipeline_model_parallel_size": 2}),
        ("p09", (8, 2, 2), [*NO_RANDOM_STATE, *experts(2, "--sequence-parallel")], {"expert_model_parallel_size": 2}),
        ("p09", (4, 1, 2), [*NO_RANDOM_STATE, *experts(1)], {"expert_model_parallel_size": 1}),
    ],
)
def test_legacy_in_a_checkout(
    fixture: str, layout: Layout, more: list[str], sizes: dict[str, int], tmp_path: Path
) -> None:
    """TP, PP, virtual stages, and experts that move into the dense optimizer."""
    _, tensor, pipeline = layout
    resume(
        fixture, layout, tmp_path, [*LEGACY, *more], checkout=True, to="legacy", megatron_version=checkout_version(),
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, **sizes,
    )  # fmt: skip


def checkout_version() -> str:
    """The checkout's own number."""
    text = (Path(os.environ[VARIABLE]) / "megatron" / "core" / "package_info.py").read_text()
    return ".".join(re.search(rf"^{part} = (\d+)", text, re.MULTILINE)[1] for part in ("MAJOR", "MINOR", "PATCH"))
