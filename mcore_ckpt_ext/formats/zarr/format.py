"""The declaration of `zarr`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.backend import CONFIG_FILE, is_finished
from mcore_ckpt_ext.formats.format import Format, OpenOptions
from mcore_ckpt_ext.formats.target import Target

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.reader import FormatReader


class ZarrFormat(Format[Target]):
    """Megatron's `zarr`."""

    name = "zarr"
    takes_facts = True
    required_files = (CONFIG_FILE,)

    @override
    def recognizes(self, folder: Path) -> bool:
        return is_finished(folder, self.name)

    @override
    def own_files(self, folder: Path) -> tuple[str, ...]:
        return (
            r"metadata\.json|common\.pt",
            r"[^/]+/(\.zarray|\d+(\.\d+)*|shard_\d[\d._]*\.pt)",
        )

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.zarr.reader import ZarrCheckpoint

        return ZarrCheckpoint(folder, options.order_sources, options.facts)
