"""A container format of tests alone, as a package of one's own may register it; as a plugin it registers itself."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import mcore_ckpt_ext
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.formats import registry
from mcore_ckpt_ext.formats.canonical import writer
from mcore_ckpt_ext.formats.canonical.reader import CanonicalCheckpoint
from mcore_ckpt_ext.formats.format import Format
from mcore_ckpt_ext.formats.laid_out import OutputPlan, small_file, with_files
from mcore_ckpt_ext.formats.target import Target
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.storage.dcp_index import FolderIndex

MARK = "own.json"


@dataclass(frozen=True, kw_only=True)
class Own(Target):
    """A format that only tests have."""

    name: ClassVar[str] = "own"
    for_any_optimizer: ClassVar[bool] = True


class OwnCheckpoint(CanonicalCheckpoint):
    """A folder with a mark of its own."""

    name = "own"

    @classmethod
    def recognizes(cls, stored: FolderIndex) -> bool:
        return (stored.folder / MARK).exists()


def lay_out(checkpoint: CheckpointView, target: Own, family: Family | None) -> OutputPlan:
    """Lay out the files, with the mark."""
    found = writer.lay_out(checkpoint, mcore_ckpt_ext.Canonical(), family)
    return replace(found, output=with_files(found.output, small_file(MARK, b"{}")))


def own_format(module: str) -> Format:
    """Return the row of the list of formats, of this module under one of its names."""
    return Format("own", f"{module}:OwnCheckpoint", Own, f"{module}:lay_out")


if __name__ == "<run_path>":  # as a plugin
    sys.path.insert(0, str(Path(__file__).parent))
    registry.FORMATS = (own_format("own_format"), *registry.FORMATS)
