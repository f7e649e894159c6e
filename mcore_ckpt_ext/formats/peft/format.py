"""The declaration of PEFT folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.format import Format, OpenOptions
from mcore_ckpt_ext.formats.target import Target

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.listing import Listing
    from mcore_ckpt_ext.formats.reader import FormatReader


class PeftFormat(Format[Target]):
    """Folders of adapters that peft loads onto a model."""

    name = "peft"
    is_adapter_folder = True
    is_iteration = False

    @override
    def recognizes(self, folder: Path) -> bool:
        from mcore_ckpt_ext.formats.hugging_face.folder import is_peft

        return is_peft(folder)

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.hugging_face.folder import adapters_without_model
        from mcore_ckpt_ext.formats.peft.reader import PeftCheckpoint

        if options.model is None:
            raise adapters_without_model(folder)
        return PeftCheckpoint(folder, options.model, options.family)

    @override
    def list_tensors(self, folder: Path) -> Listing:
        from mcore_ckpt_ext.formats.peft.listing import list_adapters

        return list_adapters(folder)
