"""Arguments of toy jobs that go on by themselves under torchrun's agents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_on_cpu import toy_jobs

from tests.harness.jobs import SAVED


def elastic_arguments(
    folder: Path, tensor: int = 1, pipeline: int = 4, *, every: int = SAVED, more: Sequence[str] = (), **options: Any
) -> list[str]:
    """Return the arguments of a job of eight iterations that goes on by itself; `options` are those of `tiny_gpt`."""
    run = folder / "checkpoints"
    return toy_jobs.tiny_gpt(
        tensor, pipeline, iterations=8, save=run, save_interval=every, load=run,
        more=["--ckpt-ext-layout", "auto", "--make-vocab-size-divisible-by", str(128 // tensor), *more], **options,
    )  # fmt: skip
