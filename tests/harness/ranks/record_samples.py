"""Plugin: each rank that reads training data records the micro batches that Megatron's samplers yield.

With TEST_EPOCH, an epoch of the random sampler has only so many samples.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

samplers: Any = importlib.import_module("megatron.training.datasets.data_samplers")
parallel_state: Any = importlib.import_module("megatron.core.parallel_state")
FOLDER_VARIABLE = "TEST_SAMPLES"


EPOCH_VARIABLE = "TEST_EPOCH"


def install() -> None:
    """Wrap `__init__` of the random sampler, and `__iter__` of each once more."""
    _shorten(samplers.MegatronPretrainingRandomSampler)
    for sampler in (samplers.MegatronPretrainingSampler, samplers.MegatronPretrainingRandomSampler):
        _record(sampler)


def _shorten(sampler: Any) -> None:
    original = sampler.__init__

    @functools.wraps(original)
    def __init__(self: Any, dataset: Any, total_samples: int, *positional: Any, **keywords: Any) -> None:  # noqa: N807
        epoch = int(os.environ.get(EPOCH_VARIABLE, total_samples))
        original(self, dataset, min(total_samples, epoch), *positional, **keywords)

    sampler.__init__ = __init__


def _record(sampler: Any) -> None:
    original = sampler.__iter__

    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[list[int]]:  # noqa: N807
        path = Path(os.environ[FOLDER_VARIABLE]) / f"rank_{torch.distributed.get_rank()}.jsonl"
        for batch in original(self):
            if _is_first_reader():
                with path.open("a") as file:
                    file.write(f"{json.dumps(batch)}\n")
            yield batch

    sampler.__iter__ = __iter__


def _is_first_reader() -> bool:
    """Return True on the first tensor-parallel rank of the first stage; others read the same."""
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    return is_first and parallel_state.get_pipeline_model_parallel_rank() == 0


install()
