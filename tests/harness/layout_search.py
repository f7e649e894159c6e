"""Search the layouts of a small model without parameters, by its arguments."""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.found_layout import SearchRequest
from mcore_ckpt_ext.layout_choice.memory import Buffers
from mcore_ckpt_ext.layout_choice.model_table import ModelTable
from mcore_ckpt_ext.layout_choice.padded_rows import PaddedRows
from mcore_ckpt_ext.layout_choice.search import Search, search
from mcore_ckpt_ext.versions import NEWEST

SIZES = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 64, "micro_batch_size": 1}


def found_for(gpus: int, rows: PaddedRows | None = None, pins: dict[str, int] | None = None, **more: Any) -> Search:
    """The layouts of a model without parameters, by default of eight layers."""
    job = JobArguments.of({**SIZES, "global_batch_size": 96, "tensor_model_parallel_size": 1, **more})
    table = ModelTable([], job.num_layers or 0, copies=0, padded_rows=rows or PaddedRows(1, 0, 1))
    request = SearchRequest(gpus, 8, NEWEST, pins=pins or {})
    return search(job, table, ParallelLayout.from_arguments(job), request, Buffers(4))
