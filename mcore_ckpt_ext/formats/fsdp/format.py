"""The declaration of `fsdp_dtensor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.backend import is_finished
from mcore_ckpt_ext.formats.format import Format, OpenOptions

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.reader import FormatReader


class FsdpDtensorFormat(Format):
    """Megatron-FSDP's `fsdp_dtensor`."""

    name = "fsdp_dtensor"
    takes_facts = True

    @override
    def recognizes(self, folder: Path) -> bool:
        from mcore_ckpt_ext.formats.plain_dcp import plain_backend

        return plain_backend(folder) == self.name or is_finished(folder, self.name)

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.fsdp.reader import FsdpCheckpoint

        return FsdpCheckpoint(folder, options.witnesses, options.facts)
