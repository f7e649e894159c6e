"""A rank of tests/gpu/test_colossalai.py: it checks one case after the other, and writes an outcome for each."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY)]
warnings.simplefilter("ignore")

import torch  # noqa: E402 - the lines above say where things are
import torch.distributed as dist  # noqa: E402

from tests.colossalai import models, promises  # noqa: E402


def main(order: Path) -> None:
    """Check the cases of an order; where there are other ranks, a rank that fails leaves them at once.

    Args:
        order: a file with the cases, by name: module, placement and dtype, or nothing to measure memory.
    """
    # What continues from the same state then computes the same, bit for bit.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    for name, case in json.loads(order.read_text()).items():
        outcome = _outcome(case)
        path = order.parent / f"{name}, rank {dist.get_rank()}"
        path.write_text(json.dumps(outcome))
        if outcome["error"] and dist.get_world_size() > 1:
            sys.exit(1)
    dist.destroy_process_group()


def _outcome(case: list[str]) -> dict[str, Any]:
    try:
        return {"found": _checked(*case), "error": ""}
    except Exception:
        return {"found": None, "error": traceback.format_exc()}


def _checked(build: str = "", placement: str = "", dtype: str = "") -> Any:
    if not build:
        return promises.check_device_memory()
    module: Callable[[], Any] = getattr(models, build)
    return promises.check_a_resume(module, placement, getattr(torch, dtype))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
