"""Opening a checkpoint: from a path that a user has to the one interface of all formats."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError, interpreting
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.formats.base import Checkpoint, TensorHandle
from mcore_ckpt_ext.formats.canonical import CanonicalCheckpoint, is_canonical
from mcore_ckpt_ext.formats.huggingface import TRANSFORMER_ENGINE, HuggingFaceCheckpoint
from mcore_ckpt_ext.formats.huggingface_folder import is_huggingface
from mcore_ckpt_ext.formats.legacy import LegacyCheckpoint, is_legacy
from mcore_ckpt_ext.formats.torch_dist import NAME as TORCH_DIST
from mcore_ckpt_ext.formats.torch_dist import TorchDistCheckpoint, sharded_backend
from mcore_ckpt_ext.formats.zarr import NAME as ZARR
from mcore_ckpt_ext.formats.zarr import ZarrCheckpoint
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.storage.paths import as_path

__all__ = ["Checkpoint", "TensorHandle", "iteration_folder", "iteration_folders", "iteration_number", "open_checkpoint"]

TRACKER_FILE = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,})")
_BACKENDS = {TORCH_DIST: TorchDistCheckpoint, ZARR: ZarrCheckpoint}


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    witnesses: Sequence[ParameterOrder] = (),
    family: Family | None = None,
    transformer_impl: str = TRANSFORMER_ENGINE,
) -> Checkpoint:
    """Open a checkpoint; nothing but metadata is read.

    Args:
        path: a run folder (its newest iteration is taken), an `iter_XXXXXXX` or `release` folder,
            a folder in `canonical`, or one of Hugging Face's.
        witnesses: parameter orders to try when the layout of the gradient buffers is recovered.
        family: of a Hugging Face folder, where its `config.json` names none that is known.
        transformer_impl: the layer spec under whose names a Hugging Face folder is seen.

    Raises:
        UnreadableCheckpointError: there is no finished checkpoint.
        UnsupportedCheckpointError: it is of a kind that this version does not read.
    """
    with interpreting(path):
        folder = iteration_folder(as_path(path))
        if is_huggingface(folder):
            return HuggingFaceCheckpoint(folder, witnesses, family=family, transformer_impl=transformer_impl)
        return _open(folder, witnesses)


def _open(folder: Path, witnesses: Sequence[ParameterOrder]) -> Checkpoint:
    if is_canonical(folder):
        return CanonicalCheckpoint(folder, witnesses)
    if is_legacy(folder):
        return LegacyCheckpoint(folder, witnesses)
    backend = sharded_backend(folder)
    if backend not in _BACKENDS:
        raise UnsupportedCheckpointError(
            "the checkpoint's backend is not read by this version",
            found=backend,
            expected=" or ".join(_BACKENDS),
            where=str(folder),
        )
    return _BACKENDS[backend](folder, witnesses)


def iteration_number(folder: Path) -> int | None:
    """Which iteration a folder is named after; None for every other name."""
    match = _ITERATION.fullmatch(folder.name)
    return int(match[1]) if match else None


def iteration_folders(run: Path) -> dict[int, Path]:
    """What a run folder has under the names of iterations, by number, newest first."""
    found = {number: path for path in run.iterdir() if (number := iteration_number(path)) is not None}
    return dict(sorted(found.items(), reverse=True))


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
