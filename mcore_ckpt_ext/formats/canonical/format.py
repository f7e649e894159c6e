"""The declaration of `canonical`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.canonical.options import Canonical
from mcore_ckpt_ext.formats.format import Format, OpenOptions

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.family import Family
    from mcore_ckpt_ext.formats.laid_out import LaidOut
    from mcore_ckpt_ext.formats.reader import FormatReader
    from mcore_ckpt_ext.formats.view import CheckpointView


class CanonicalFormat(Format[Canonical]):
    """The layout-free format of this package."""

    name = "canonical"
    target = Canonical

    @override
    def recognizes(self, folder: Path) -> bool:
        from mcore_ckpt_ext.formats.canonical.reader import is_canonical

        return is_canonical(folder)

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.canonical.reader import CanonicalCheckpoint

        return CanonicalCheckpoint(folder, options.witnesses)

    @override
    def lay_out(self, checkpoint: CheckpointView, target: Canonical, family: Family | None) -> LaidOut:
        from mcore_ckpt_ext.formats.canonical.writer import lay_out

        return lay_out(checkpoint)
