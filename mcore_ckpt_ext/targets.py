"""What a conversion can write, by the name that `mcore-ckpt convert --to` knows it by."""

from __future__ import annotations

from mcore_ckpt_ext.formats.registry import FORMATS
from mcore_ckpt_ext.formats.target import Target

__all__ = ["TARGETS", "Target"]

TARGETS: dict[str, type[Target]] = {one.target.name: one.target for one in FORMATS if one.target is not None}
"""The options of each format that is written."""
