"""The list of formats, each a line: there is no other one.

The first that recognizes a folder opens it: what can be taken for another format stands before that.
"""

from __future__ import annotations

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
    """Return the format that options are of."""
    return next(one for one in FORMATS if one.target is type(target))


def format_of(folder: Path) -> Format[Any] | None:
    """Return the format of a folder by its marks; None where it is in no format that is read, or unfinished."""
    return next((one for one in FORMATS if one.recognizes(folder)), None)
