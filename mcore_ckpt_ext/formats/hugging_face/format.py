"""The declaration of Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.format import Format, OpenOptions

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.reader import FormatReader


class HuggingFaceFormat(Format):
    """Folders that transformers loads."""

    name = "hf"
    is_iteration = False

    @override
    def recognizes(self, folder: Path) -> bool:
        from mcore_ckpt_ext.formats.hugging_face.folder import is_huggingface

        return is_huggingface(folder)

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(
            folder, options.witnesses, family=options.family, transformer_impl=options.transformer_impl
        )

    @override
    def can_be_verified(self, folder: Path) -> bool:
        from mcore_ckpt_ext.storage.file_digests import FILE_NAME

        return (folder / FILE_NAME).exists()
