"""Reads NeMo 2's `weights/`: a `torch_dist` checkpoint with other keys and another common state.

Source: `MegatronStrategy.save_checkpoint` and `MegatronParallel.sharded_state_dict` of NeMo 2.3.2: each key of the
model begins with `module.`, also within the optimizer's keys. The optimizer's entry is a list of one. The common state
also contains Lightning's own state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from typing_extensions import override

from mcore_ckpt_ext.formats.torch_dist.reader import TorchDistCheckpoint
from mcore_ckpt_ext.formats.unread_state import COMMON_KEYS
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.loops.nemo import PREFIX, WEIGHTS
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE, FolderIndex
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex

# Lightning's counter of steps (`dump_checkpoint`, its trainer's checkpoint connector).
_STEP = "global_step"

Value = TypeVar("Value")


class NemoCheckpoint(TorchDistCheckpoint):
    """The folder `weights` of one checkpoint, under Megatron's keys."""

    @classmethod
    @override
    def recognizes(cls, stored: FolderIndex) -> bool:
        return stored.folder.name == WEIGHTS and (stored.folder / METADATA_FILE).exists()

    @override
    def _read_index(self) -> DcpIndex:
        index = self.folder_index.content
        arrays = {key: replace(array, key=key) for key, array in _rename(index.arrays).items()}
        return replace(
            index, arrays=arrays, objects=_rename(index.objects), natural_shapes=_rename(index.natural_shapes)
        )

    @cached_property
    def _stored_common(self) -> dict[str, Any]:
        return super()._read_common()

    @override
    def _read_common(self) -> dict[str, Any]:
        stored = self._stored_common
        common = {name: stored[name] for name in COMMON_KEYS if name in stored}
        optimizers = stored.get("optimizer")
        if isinstance(optimizers, list) and len(optimizers) == 1:
            common["optimizer"] = optimizers[0]
        step = stored.get(_STEP)
        return common | ({"iteration": step} if isinstance(step, int) else {})

    @override
    def _notices(self, view: CheckpointView) -> list[str]:
        read_keys = {*COMMON_KEYS, "optimizer", _STEP}
        left = sorted(str(name) for name, value in self._stored_common.items() if name not in read_keys and value)
        dropped = [f"left out of the common state, as it belongs to Lightning: {', '.join(left)}"] if left else []
        return [*super()._notices(view), *dropped]


def _rename(entries: Mapping[str, Value]) -> dict[str, Value]:
    """Return entries under Megatron's keys.

    Raises:
        ValueError: two entries get the same key.
    """
    renamed = {_name(key): value for key, value in entries.items()}
    if len(renamed) < len(entries):
        raise ValueError(f"two keys differ only in {PREFIX!r}")
    return renamed


def _name(key: str) -> str:
    """Return Megatron's key for `optimizer.state.exp_avg.module.decoder...` or `module.decoder...`."""
    before, prefix, name = key.partition(PREFIX)
    is_prefix = prefix and (not before or before.endswith(".") and before.startswith(("optimizer.state.", "chained_")))
    return before + name.removeprefix(PREFIX) if is_prefix else key
