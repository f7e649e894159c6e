"""Test, over all divisors of a global batch, what the samplers of a release read through a change of layout and back.

With MEGATRON_LM_PATH they are those of a checkout, of any release.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training.datasets import data_samplers

from mcore_ckpt_ext.continuity.data_order import followed_history
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.cyclic_sampler import DataHistory, keep_history, wrap_iter
from mcore_ckpt_ext.patching.singletons import PROCESS
from tests.harness.checkouts import EITHER, VARIABLE

_BATCH = 12
_EPOCH = 4 * _BATCH
_LAYOUTS = [
    (data, micro) for data in range(1, _BATCH + 1) for micro in range(1, _BATCH + 1) if not _BATCH % (data * micro)
]
"""All data-parallel sizes with all micro batch sizes whose product divides the global batch."""


@pytest.fixture(params=EITHER)
def samplers(request: pytest.FixtureRequest) -> Any:
    """The module of Megatron with its samplers; those of a checkout are wrapped here."""
    if not request.param:
        return data_samplers
    places = ("training/datasets", "legacy/data")
    files = [Path(os.environ[VARIABLE]) / "megatron" / place / "data_samplers.py" for place in places]
    spec = importlib.util.spec_from_file_location("samplers_of_checkout", next(filter(Path.is_file, files)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sampler: Any = module.MegatronPretrainingRandomSampler
    sampler.__iter__ = wrap_iter(sampler.__iter__)
    return module


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    PROCESS.one(DataHistory).layouts = ()


def _job(data: int, micro: int, loader: str, is_sharded: bool) -> JobArguments:
    return JobArguments.of({
        "dataloader_type": loader, "data_parallel_size": data, "micro_batch_size": micro, "data_sharding": is_sharded,
        "consumed_train_samples": 0, "consumed_valid_samples": 0, "global_batch_size": _BATCH,
    })  # fmt: skip


def _batches(samplers: Any, job: JobArguments, consumed: int, until: int) -> list[list[int]]:
    """The global batches that all ranks of a job read, sorted, by Megatron's samplers."""
    data = job.data_parallel_size or 0
    micro = job.micro_batch_size or 0
    dataset = SimpleNamespace(split=SimpleNamespace(name="train"))
    if job.dataloader_type == "single":
        ranks = [samplers.MegatronPretrainingSampler(_EPOCH, consumed, micro, rank, data) for rank in range(data)]
    else:
        ranks = [
            samplers.MegatronPretrainingRandomSampler(
                dataset, _EPOCH, consumed, micro, rank, data, job.data_sharding is not False
            )
            for rank in range(data)
        ]
    steps = [[sample for batch in step for sample in batch] for step in zip(*ranks, strict=False)]
    read = sum(steps, [])[: until - consumed]
    return [sorted(read[start : start + _BATCH]) for start in range(0, len(read), _BATCH)]


@pytest.mark.parametrize(("loader", "is_sharded"), [("single", True), ("cyclic", True), ("cyclic", False)])
def test_an_epoch_has_the_same_global_batches_through_every_change_and_back(
    samplers: Any, loader: str, is_sharded: bool
) -> None:
    alone = {layout: _batches(samplers, _job(*layout, loader, is_sharded), 0, _EPOCH) for layout in _LAYOUTS}
    assert all(sorted(sum(batches, [])) == list(range(_EPOCH)) for batches in alone.values())
    for old, new in product(_LAYOUTS, repeat=2):
        written: JobArguments | None = None
        batches: list[list[int]] = []
        for layout, until in ((old, _BATCH), (new, 3 * _BATCH), (old, _EPOCH)):
            job = _job(*layout, loader, is_sharded)
            arguments = SimpleNamespace(**job.raw)
            keep_history(() if written is None else followed_history(written, job), arguments)
            batches += _batches(samplers, job, len(batches) * _BATCH, until)
            written = JobArguments.of({**vars(arguments), "consumed_train_samples": until})
        assert batches == alone[old], (old, new)
