"""The only list of formats, one line each.

The first format that recognizes a folder opens it, so a format that could be mistaken for another precedes it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.formats.canonical.format import CanonicalFormat
from mcore_ckpt_ext.formats.colossalai.format import ColossalAIFormat
from mcore_ckpt_ext.formats.format import Format
from mcore_ckpt_ext.formats.fsdp.format import FsdpDtensorFormat
from mcore_ckpt_ext.formats.hugging_face.format import HuggingFaceFormat
from mcore_ckpt_ext.formats.legacy.format import LegacyFormat
from mcore_ckpt_ext.formats.nemo.format import NemoFormat
from mcore_ckpt_ext.formats.peft.format import PeftFormat
from mcore_ckpt_ext.formats.target import Target
from mcore_ckpt_ext.formats.torch_dcp.format import TorchDcpFormat
from mcore_ckpt_ext.formats.torch_dist.format import TorchDistFormat
from mcore_ckpt_ext.formats.verl.format import VerlFormat
from mcore_ckpt_ext.formats.zarr.format import ZarrFormat
from mcore_ckpt_ext.storage.paths import as_path

FORMATS: tuple[Format[Any], ...] = (
    NemoFormat(),
    TorchDistFormat(),
    ZarrFormat(),
    LegacyFormat(),
    PeftFormat(),
    ColossalAIFormat(),
    HuggingFaceFormat(),
    CanonicalFormat(),
    VerlFormat(),
    FsdpDtensorFormat(),
    TorchDcpFormat(),
)


def format_written(target: Target) -> Format[Any]:
    """Return the format that options belong to."""
    return next(one for one in FORMATS if one.target is type(target))


def is_adapter_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder that contains adapters without their model."""
    folder = as_path(path)
    return any(one.is_adapter_folder and one.recognizes(folder) for one in FORMATS)


def format_of(folder: Path) -> Format[Any] | None:
    """Return the format of a folder by its marker files; None if it is unsupported or unfinished."""
    return next((one for one in FORMATS if one.recognizes(folder)), None)
