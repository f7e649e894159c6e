"""Megatron's formats `torch_dcp` and `fsdp_dtensor`, which are plain torch distributed checkpoints.

Source: `save_checkpoint` and `_get_checkpoint_format`, megatron/training/checkpointing.py, core_v0.12.0 to 0.19.2:
the folder has a `.metadata`, but neither a `metadata.json` nor a common state. An interrupted save of `torch_dist`
also lacks `metadata.json`, but the keys of its objects are numbered (`/shard_0_1`), and the arguments have no key.
"""

from __future__ import annotations

from mcore_ckpt_ext.errors import ContentError
from mcore_ckpt_ext.formats.backend import CONFIG_FILE
from mcore_ckpt_ext.formats.torch_dist.reader import COMMON_FILE
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE, FolderIndex

TORCH_DCP = "torch_dcp"
FSDP_DTENSOR = "fsdp_dtensor"
_SHARD = "/shard_"
_ARGUMENTS = "args"
_BEHIND_WRAPPERS = ("model.module.", "model0.module.", "optimizer.state.module.")


def plain_backend(stored: FolderIndex) -> str | None:
    """Return which of these formats the folder of an index has; None for neither.

    Module names begin with `module.` under Megatron-FSDP's wrappers, but not under those of `--use-torch-fsdp2`.
    """
    folder = stored.folder
    if any((folder / name).exists() for name in (CONFIG_FILE, COMMON_FILE)) or not (folder / METADATA_FILE).exists():
        return None
    try:
        index = stored.content
    except ContentError:
        return None
    if _ARGUMENTS not in index.objects or any(_SHARD in key for key in index.objects):
        return None
    return FSDP_DTENSOR if any(key.startswith(_BEHIND_WRAPPERS) for key in index.arrays) else TORCH_DCP
