"""Test the optimizer formats with an array for each bucket."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.optimizers.bucket_formats import bucket_state
from mcore_ckpt_ext.optimizers.optimizer_format import StoredKeys
from mcore_ckpt_ext.storage.index_entries import ChunkTable, StoredArray
from tests.harness.checkpoints import fixture_named

KEY = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param"


@pytest.mark.parametrize(("name", "reads"), [("p10", False), ("p07", True)])
def test_only_the_older_format_needs_an_object_of_each_group(name: str, reads: bool) -> None:
    """Each rank of a large job plans from the index: an object of each group would be read by each of them."""
    checkpoint: Any = open_checkpoint(fixture_named(name).run).format.reader
    label = checkpoint.optimizer.format()
    before = checkpoint.files.reader.bytes_read
    state = bucket_state(StoredKeys(checkpoint.index.arrays, {}, {}, True, label, checkpoint.object))
    assert (checkpoint.files.reader.bytes_read > before) == reads
    for (_, group), arrays in state.arrays.items():
        recorded = checkpoint.object(f"optimizer.distributed.dp_group_idx_{group}.per_bucket_numel_unpadded/shard_0_1")
        for (bucket, _), array in arrays.items():
            ((_, numels),) = recorded[bucket.buffer].items()
            assert array.numel == numels[bucket.bucket]
            assert array.is_contiguous


def test_state_with_two_axes_is_refused() -> None:
    chunks = ChunkTable().extend("float32", 2, ["file"], [0], [99], [(0, 0)], [(2, 3)])
    keys = StoredKeys({KEY: StoredArray(KEY, (2, 3), "float32", chunks)}, {}, {}, True, None, lambda key: None)
    with pytest.raises(UnreadableCheckpointError, match=r"is not flat; found: shape \(2, 3\).*" + re.escape(KEY)):
        bucket_state(keys)
