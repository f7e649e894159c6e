"""The first release of Megatron Core with each name that this package needs and the oldest lacks.

Compared in megatron/training/checkpointing.py and async_utils.py, megatron/core/dist_checkpointing/serialization.py,
strategies/async_utils.py and strategies/filesystem_async.py of every release from core_v0.7.0 to 0.19.2, and in
megatron/core/optimizer/optimizer.py of these and of the development head of August 2026.
"""

from __future__ import annotations

from mcore_ckpt_ext.versions import Version, parse_version

FIRST_WITH_NAME = {
    "_get_write_results_queue": Version(0, 8),
    "CheckpointType": Version(0, 9),
    "load_preprocess": Version(0, 9),
    "_get_checkpoint_format": Version(0, 12),
    "init_persistent_async_worker": Version(0, 12),
    "PersistentAsyncCaller.async_loop": Version(0, 12),
    "FileSystemReader": Version(0, 14),
    "set_loaded_iteration": Version(0, 16),
    "_get_async_calls_queue": Version(0, 17),
    "get_write_results_queue": Version(0, 17),
    "megatron.core.optimizer.optimizer:param_group_identifier_keys": Version(0, 20),
}


def precedes_name(release: str | None, name: str) -> bool:
    """Return True if a release is older than the first with a name; False if the release is unknown."""
    version = parse_version(release)
    return version is not None and name in FIRST_WITH_NAME and version < FIRST_WITH_NAME[name]
