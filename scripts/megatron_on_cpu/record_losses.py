"""Records the loss of every iteration in full precision; Megatron's log has seven digits.

Set ``MEGATRON_ON_CPU_LOSSES`` to a file.  The last rank, which is on the last pipeline stage, writes a JSON object to
it, one item for each iteration: ``{"5": {"lm loss": 4.709, "grad_norm": 1.104, "learning_rate": 0.00097}, ...}``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

FILE_VARIABLE = "MEGATRON_ON_CPU_LOSSES"
"""Environment variable with the file to write."""


def install() -> None:
    """Wrap ``training_log`` if the environment names a file, which is looked up at each call."""
    if FILE_VARIABLE not in os.environ:
        return
    training: Any = importlib.import_module("megatron.training.training")
    original = training.training_log
    signature = inspect.signature(original)
    records: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)

    @functools.wraps(original)
    def log_and_record(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        file = os.environ[FILE_VARIABLE]
        records[file][given["iteration"]] = _numbers(given)
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            Path(file).write_text(json.dumps(records[file]))
        return original(*args, **kwargs)

    training.training_log = log_and_record


def _numbers(given: dict[str, Any]) -> dict[str, float]:
    numbers = {name: float(value) for name, value in given["loss_dict"].items()}
    for name in ("grad_norm", "learning_rate"):
        if given[name] is not None:
            numbers[name] = float(given[name])
    return numbers
