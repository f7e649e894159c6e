"""Plugin: after a save, each first data-parallel rank records the content of its live gradient buffers."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from names import names_of

training: Any = importlib.import_module("megatron.training.training")
FOLDER_VARIABLE = "TEST_BUFFERS"


def buckets_of(optimizer: Any, names: dict[int, str]) -> Iterator[dict[str, Any]]:
    """Yield each bucket with the parameters at the elements that their gradients occupy."""
    for number, buffer in enumerate(optimizer.buffers):
        for bucket in buffer.buckets:
            start = bucket.grad_data.data_ptr()
            size = bucket.grad_data.element_size()
            places = sorted(
                ((parameter.main_grad.data_ptr() - start) // size, parameter.numel(), names[id(parameter)])
                for parameter in bucket.params
            )
            yield {
                "buffer": number,
                "bucket": bucket.bucket_id,
                "numel": bucket.grad_data.numel(),
                "parameters": [[name, first, first + count] for first, count, name in places],
            }


def install() -> None:
    """Wrap `save_checkpoint` once more."""
    original = training.save_checkpoint

    @functools.wraps(original)
    def save_checkpoint(iteration: int, model: Any, optimizer: Any, *positional: Any, **keywords: Any) -> Any:
        result = original(iteration, model, optimizer, *positional, **keywords)
        names = names_of(model)
        for child in getattr(optimizer, "chained_optimizers", [optimizer]):
            if child.data_parallel_group.rank() == 0:
                content = {"index": child.data_parallel_group_idx, "buckets": list(buckets_of(child, names))}
                path = Path(os.environ[FOLDER_VARIABLE]) / f"rank_{torch.distributed.get_rank()}.json"
                path.write_text(json.dumps(content))
        return result

    training.save_checkpoint = save_checkpoint


if FOLDER_VARIABLE in os.environ:
    install()
