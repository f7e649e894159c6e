"""The declaration of the legacy format `torch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.format import Format, OpenOptions

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.reader import FormatReader


class LegacyFormat(Format):
    """Megatron's legacy format `torch`."""

    name = "legacy"

    @override
    def recognizes(self, folder: Path) -> bool:
        from mcore_ckpt_ext.formats.legacy.reader import is_legacy

        return is_legacy(folder)

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.legacy.reader import LegacyCheckpoint

        return LegacyCheckpoint(folder, options.witnesses)
