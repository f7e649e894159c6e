"""The declaration of NeMo's `weights` folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.backend import CONFIG_FILE
from mcore_ckpt_ext.formats.format import Format, OpenOptions
from mcore_ckpt_ext.formats.target import Target
from mcore_ckpt_ext.job.loops.nemo import WEIGHTS
from mcore_ckpt_ext.storage.index_entries import METADATA_FILE

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.reader import FormatReader


class NemoFormat(Format[Target]):
    """NeMo 2's `weights`."""

    name = "nemo"
    takes_facts = True
    required_files = (CONFIG_FILE, METADATA_FILE)

    @override
    def recognizes(self, folder: Path) -> bool:
        return folder.name == WEIGHTS and (folder / METADATA_FILE).exists()

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.nemo.reader import NemoCheckpoint

        return NemoCheckpoint(folder, options.order_sources, options.facts)
