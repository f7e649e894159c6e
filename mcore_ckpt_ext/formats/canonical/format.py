"""The declaration of `canonical`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.format import Format, OpenOptions

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.reader import FormatReader


class CanonicalFormat(Format):
    """The layout-free format of this package."""

    name = "canonical"

    @override
    def recognizes(self, folder: Path) -> bool:
        from mcore_ckpt_ext.formats.canonical.reader import is_canonical

        return is_canonical(folder)

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.canonical.reader import CanonicalCheckpoint

        return CanonicalCheckpoint(folder, options.witnesses)
