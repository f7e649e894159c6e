"""Test the division of layers among pipeline stages; `tests/jobs/test_layout_choice.py` compares it with Megatron's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout_choice.stage_split import applied_split, stage_splits
from mcore_ckpt_ext.versions import Version


def layers(pipeline: int, virtual: int = 1, **ends: int) -> Any:
    arguments = {f"decoder_{end}_pipeline_num_layers": count for end, count in ends.items()}
    split = applied_split(JobArguments.of({"num_layers": 8}), arguments, pipeline, virtual)
    return split and split.layers


@pytest.mark.parametrize(("pipeline", "virtual", "ends", "split"), [
    (2, 1, {}, ((4,), (4,))),
    (2, 1, {"first": 2}, ((2,), (6,))),
    (3, 1, {"first": 2, "last": 2}, ((2,), (4,), (2,))),
    (2, 1, {"first": 8}, None),
    (3, 2, {"first": 2, "last": 2}, ((1, 1), (2, 2), (1, 1))),
    (2, 2, {"first": 4, "last": 4}, None),
])  # fmt: skip
def test_stages_with_their_own_number_of_layers(
    pipeline: int, virtual: int, ends: dict[str, int], split: object
) -> None:
    assert layers(pipeline, virtual, **ends) == split


@pytest.mark.parametrize(("total", "pipeline", "virtual", "ends"), [
    (66, 4, 3, (None, 12)),
    (60, 8, 2, (None, 4)),
    (56, 8, 4, (4, 4)),
    (40, 6, 2, (4, 4)),
])  # fmt: skip
def test_ends_whose_layers_virtual_stages_share(
    total: int, pipeline: int, virtual: int, ends: tuple[int | None, int | None]
) -> None:
    job = JobArguments.of({"num_layers": total})
    found = [dict(split.arguments) for split in stage_splits(job, pipeline, virtual, Version(0, 19))]
    names = [f"decoder_{end}_pipeline_num_layers" for end in ("first", "last")]
    assert ends in [tuple(arguments[name] for name in names) for arguments in found]


def test_no_end_is_without_layers() -> None:
    """Megatron refuses it (`TransformerConfig`)."""
    for pipeline, virtual in itertools.product(range(2, 9), range(1, 9)):
        for split in stage_splits(JobArguments.of({"num_layers": 18}), pipeline, virtual, Version(0, 19)):
            ends = [count for name, count in split.arguments if name.startswith("decoder_") and count is not None]
            assert all(count > 0 for count in ends), (pipeline, virtual, split)
