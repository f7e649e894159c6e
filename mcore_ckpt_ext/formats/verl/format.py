"""The declaration of verl's step folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.format import Format, OpenOptions
from mcore_ckpt_ext.formats.target import Target

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.reader import FormatReader


class VerlFormat(Format[Target]):
    """verl's step folders."""

    name = "verl"
    takes_facts = True

    @override
    def recognizes(self, folder: Path) -> bool:
        from mcore_ckpt_ext.formats.verl.reader import is_verl

        return is_verl(folder)

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.verl.reader import VerlCheckpoint

        return VerlCheckpoint(folder, options.order_sources, options.facts)
