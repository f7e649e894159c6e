"""Test the arguments of a live job: the fields of Megatron's own objects from which they are read."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.megatron.live.arguments import BUFFER_ARGUMENTS, chunks_of


def test_the_fields_of_gradient_buffers_are_megatrons() -> None:
    config = pytest.importorskip("megatron.core.distributed.distributed_data_parallel_config")
    missing = BUFFER_ARGUMENTS.keys() - {field.name for field in fields(config.DistributedDataParallelConfig)}
    # Up to 0.17 the loop makes a bucket size of the number of buckets (megatron/training/training.py, get_model).
    assert missing <= {"num_buckets"}
    assert "bucket_size" in BUFFER_ARGUMENTS
    assert BUFFER_ARGUMENTS["num_buckets"] == "ddp_num_buckets"


def test_the_chunks_of_a_chain_of_optimizers() -> None:
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    wrapped = torch.nn.DataParallel(model)
    children = [SimpleNamespace(gbuf_ranges=[], model_chunks=chunks) for chunks in ([wrapped, other], [wrapped])]
    assert chunks_of(SimpleNamespace(chained_optimizers=children)) == [model, other]


def test_an_optimizer_without_a_model_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="the model of the optimizer is unknown"):
        chunks_of(torch.optim.SGD([torch.zeros(1)]))
