"""Plugin: each rank that reads training data records the micro batches that Megatron's random sampler yields."""

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


def install() -> None:
    """Wrap `__iter__` of the sampler once more."""
    original = samplers.MegatronPretrainingRandomSampler.__iter__

    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[list[int]]:  # noqa: N807
        path = Path(os.environ[FOLDER_VARIABLE]) / f"rank_{torch.distributed.get_rank()}.jsonl"
        for batch in original(self):
            if parallel_state.get_tensor_model_parallel_rank() == 0:  # its peers read the same
                with path.open("a") as file:
                    file.write(f"{json.dumps(batch)}\n")
            yield batch

    samplers.MegatronPretrainingRandomSampler.__iter__ = __iter__


install()
