"""Megatron's formats `torch_dcp` and `fsdp_dtensor`: torch's own distributed checkpoint, and which of the two it is.

Source: `save_checkpoint` and `_get_checkpoint_format`, megatron/training/checkpointing.py, core_v0.12.0 to 0.19.2:
there is a `.metadata`, and neither a `metadata.json` nor a common state. An interrupted save of `torch_dist` has no
`metadata.json` either, but its objects are numbered (`/shard_0_1`), and it has no key for the arguments alone.
"""

from __future__ import annotations

from pathlib import Path

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.backend import CONFIG_FILE
from mcore_ckpt_ext.formats.torch_dcp.reader import NAME as TORCH_DCP
from mcore_ckpt_ext.formats.torch_dist.reader import COMMON_FILE
from mcore_ckpt_ext.optimizers.model_space_formats import FSDP_DTENSOR
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE, read_index

_SHARD = "/shard_"
_ARGUMENTS = "args"
_BEHIND_WRAPPERS = ("model.module.", "model0.module.", "optimizer.state.module.")


def plain_backend(folder: Path) -> str | None:
    """In which of these formats an iteration folder is; None where it is in neither.

    Behind Megatron-FSDP's wrappers the names of modules begin with `module.`, behind those of `--use-torch-fsdp2` not.
    """
    if any((folder / name).exists() for name in (CONFIG_FILE, COMMON_FILE)) or not (folder / METADATA_FILE).exists():
        return None
    try:
        index = read_index(folder)
    except CheckpointError:
        return None
    if _ARGUMENTS not in index.objects or any(_SHARD in key for key in index.objects):
        return None
    return FSDP_DTENSOR if any(key.startswith(_BEHIND_WRAPPERS) for key in index.arrays) else TORCH_DCP
