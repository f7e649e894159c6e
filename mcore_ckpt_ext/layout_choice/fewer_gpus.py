"""Finds layouts of fewer GPUs that keep the tensor parallel size and the batch.

Tests: tests/operations/test_plan_of_an_expert.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.found_layout import FoundLayout, SearchRequest
from mcore_ckpt_ext.layout_choice.memory import Buffers
from mcore_ckpt_ext.layout_choice.model_table import ModelTable
from mcore_ckpt_ext.layout_choice.order import usage_key
from mcore_ckpt_ext.layout_choice.search import search

_MOST_FEWER = 64
_MOST_COMPARED = 4


def with_fewer_gpus(
    job: JobArguments,
    table: ModelTable,
    old: ParallelLayout,
    request: SearchRequest,
    buffers: Buffers,
    candidates: Sequence[FoundLayout],
) -> list[FoundLayout]:
    """Return the best layouts of fewer GPUs that keep TP and the batch, as an elastic job orders them.

    Of the next smaller numbers of GPUs with such a layout, some use less of the time of all GPUs than others.

    Returns:
        At most two; none if the best layout of all GPUs keeps both.
    """

    def keeps(candidate: FoundLayout) -> bool:
        choice = candidate.choice
        return candidate.fits is not False and choice.keeps_batch and choice.layout.tensor == old.tensor

    if candidates and keeps(candidates[0]):
        return []
    fewer: list[FoundLayout] = []
    for gpus in range(request.gpus - 1, max(request.gpus - _MOST_FEWER, request.gpus // 2, 1) - 1, -1):
        if gpus % old.tensor or len(fewer) == _MOST_COMPARED:
            continue
        smaller = replace(request, gpus=gpus, pins={"tensor": old.tensor})
        best = next(filter(keeps, search(job, table, old, smaller, buffers).found), None)
        fewer += [best] if best is not None else []
    return sorted(fewer, key=lambda candidate: usage_key(candidate, old, request))[:2]
