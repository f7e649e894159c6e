"""The declaration of ColossalAI's folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.format import Format, OpenOptions
from mcore_ckpt_ext.formats.target import Target

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.listing import Listing
    from mcore_ckpt_ext.formats.reader import FormatReader


class ColossalAIFormat(Format[Target]):
    """Folders that ColossalAI's Booster saved."""

    name = "colossalai"
    is_iteration = False

    @override
    def recognizes(self, folder: Path) -> bool:
        from mcore_ckpt_ext.formats.colossalai.reader import is_colossalai

        return is_colossalai(folder)

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.colossalai.reader import ColossalAICheckpoint

        return ColossalAICheckpoint(
            folder, options.order_sources, family=options.family, transformer_impl=options.transformer_impl
        )

    @override
    def list_tensors(self, folder: Path) -> Listing:
        from mcore_ckpt_ext.formats.colossalai.listing import list_checkpoint

        return list_checkpoint(folder)
