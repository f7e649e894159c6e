"""The formats that a conversion can write, by their names for `mcore-ckpt convert --to`."""

from __future__ import annotations

from mcore_ckpt_ext.formats.registry import FORMATS
from mcore_ckpt_ext.formats.target import Target

__all__ = ["TARGETS", "Target"]

TARGETS: dict[str, type[Target]] = {one.target.name: one.target for one in FORMATS if one.target is not None}
"""The class of options for each format that this package writes."""
