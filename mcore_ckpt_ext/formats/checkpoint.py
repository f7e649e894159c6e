"""Opening a checkpoint: from a path that a user has to the one interface of all formats."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mcore_ckpt_ext.errors import ProofError, UnreadableCheckpointError
from mcore_ckpt_ext.formats.torch_dist import TorchDistCheckpoint
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.layout.proof import first_mismatch
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT, LogicalTensor
from mcore_ckpt_ext.transfer import read_slice

TRACKER_FILE = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class TensorHandle:
    """One global tensor of a checkpoint; reading is lazy."""

    checkpoint: Checkpoint
    kind: str
    logical: LogicalTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.logical.shape

    @property
    def dtype(self) -> torch.dtype:
        """Stored dtype."""
        found: torch.dtype = getattr(torch, self.logical.dtype)
        return found

    def read(self, region: Region | None = None) -> torch.Tensor:
        """The tensor, or the part of it that `region` names; optimizer state is proven where it is read.

        Raises:
            ProofError: the masters of that part do not round to its weights.
            CheckpointError: it is damaged or incomplete, or its layout cannot be recovered.
        """
        wanted = region or Region.whole(self.logical.name, self.logical.shape)
        values = self._read(self.kind, wanted)
        if self.kind != WEIGHT:
            masters = values if self.kind == FP32_PARAM else self._read(FP32_PARAM, wanted)
            mismatch = first_mismatch(masters, self._read(WEIGHT, wanted))
            if mismatch is not None:
                raise ProofError(
                    "a master does not round to the weight beside it",
                    found=f"master {mismatch.master!r}",
                    expected=f"weight {mismatch.weight!r}",
                    where=f"{wanted.name}, element {mismatch.position} of {wanted}, {self.checkpoint.folder}",
                    helps="the checkpoint is damaged, or its weights were edited after the save",
                )
        return values.view(wanted.sizes)

    def _read(self, kind: str, region: Region) -> torch.Tensor:
        return read_slice(self.checkpoint, self.checkpoint.transfer, kind, Slice.whole((region,)))


class Checkpoint(TorchDistCheckpoint):
    """An open checkpoint of any format, seen in model space."""

    def tensor(self, kind: str, name: str) -> TensorHandle:
        """The handle of one tensor.

        Raises:
            KeyError: the checkpoint has none of that kind and name.
        """
        logical = self.logical_tensor(kind, name)
        if logical is None:
            raise KeyError(f"no {kind} {name} in {self.folder}")
        return TensorHandle(self, kind, logical)


def open_checkpoint(path: str | os.PathLike[str], *, witnesses: Sequence[ParameterOrder] = ()) -> Checkpoint:
    """Open a checkpoint; nothing but metadata is read.

    Args:
        path: a run folder (its newest iteration is taken), or an `iter_XXXXXXX` or `release` folder.
        witnesses: parameter orders to try when the layout of the gradient buffers is recovered.

    Raises:
        UnreadableCheckpointError: there is no finished checkpoint.
        UnsupportedCheckpointError: it is of a kind that this version does not read.
    """
    return Checkpoint(iteration_folder(Path(path)), witnesses)


def iteration_folder(path: Path) -> Path:
    """The iteration folder that a run folder's tracker names, or `path` itself where it has no tracker.

    Source: `read_metadata` and `get_checkpoint_name`, megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2.
    """
    if not path.is_dir():
        raise UnreadableCheckpointError(
            "there is no such folder, or it cannot be read", where=str(path), helps="check the path given to --load"
        )
    tracker = path / TRACKER_FILE
    if not tracker.exists():
        return path
    text = tracker.read_text().strip()
    if text == "release":
        return path / "release"
    if not text.isdigit():
        raise UnreadableCheckpointError("the tracker file names no iteration", found=text[:40], where=str(tracker))
    return path / f"iter_{int(text):07d}"
