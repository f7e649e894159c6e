"""Megatron's formats `torch_dcp` and `fsdp_dtensor`: torch's own distributed checkpoint, which is not read here.

Source: `save_checkpoint` and `_get_checkpoint_format`, megatron/training/checkpointing.py, core_v0.12.0 to 0.19.2:
there is a `.metadata`, and neither a `metadata.json` nor a common state. An interrupted save of `torch_dist` has no
`metadata.json` either, but its objects are numbered (`/shard_0_1`), and it has no key for the arguments alone.
"""

from __future__ import annotations

from pathlib import Path

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.backend import CONFIG_FILE
from mcore_ckpt_ext.formats.torch_dist import COMMON_FILE
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE, read_index

NAMES = "torch_dcp or fsdp_dtensor"
_SHARD = "/shard_"
_ARGUMENTS = "args"


def is_plain_dcp(folder: Path) -> bool:
    """Whether an iteration folder is in one of these formats."""
    if any((folder / name).exists() for name in (CONFIG_FILE, COMMON_FILE)) or not (folder / METADATA_FILE).exists():
        return False
    try:
        index = read_index(folder)
    except CheckpointError:
        return False
    return _ARGUMENTS in index.objects and not any(_SHARD in key for key in index.objects)
