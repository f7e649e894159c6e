"""Test the arguments of a live job: the fields of Megatron's own objects from which they are read."""

from __future__ import annotations

from dataclasses import fields

import pytest

from mcore_ckpt_ext.megatron.live.arguments import OF_BUFFERS


def test_the_fields_of_gradient_buffers_are_megatrons() -> None:
    config = pytest.importorskip("megatron.core.distributed.distributed_data_parallel_config")
    missing = OF_BUFFERS.keys() - {field.name for field in fields(config.DistributedDataParallelConfig)}
    # Up to 0.17 the loop makes a bucket size of the number of buckets (megatron/training/training.py, get_model).
    assert missing <= {"num_buckets"}
    assert "bucket_size" in OF_BUFFERS
    assert OF_BUFFERS["num_buckets"] == "ddp_num_buckets"
