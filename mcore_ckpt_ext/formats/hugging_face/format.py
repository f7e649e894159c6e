"""The declaration of Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.format import Format, OpenOptions
from mcore_ckpt_ext.formats.hugging_face.options import HuggingFace

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.family import Family
    from mcore_ckpt_ext.formats.laid_out import OutputPlan
    from mcore_ckpt_ext.formats.listing import Listing
    from mcore_ckpt_ext.formats.reader import FormatReader
    from mcore_ckpt_ext.formats.view import CheckpointView


class HuggingFaceFormat(Format[HuggingFace]):
    """Folders that transformers loads."""

    name = "hf"
    target = HuggingFace
    is_iteration = False

    @override
    def recognizes(self, folder: Path) -> bool:
        from mcore_ckpt_ext.formats.hugging_face.folder import is_huggingface

        return is_huggingface(folder)

    @override
    def own_files(self, folder: Path) -> tuple[str, ...]:
        from mcore_ckpt_ext.formats.auxiliary_files import COMPANION_PATTERN
        from mcore_ckpt_ext.formats.hugging_face.folder import CONFIG, written_by_us

        if not (folder / CONFIG).is_file() or not written_by_us(folder):
            return ()
        return (r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?", COMPANION_PATTERN)

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(
            folder, options.order_sources, family=options.family, transformer_impl=options.transformer_impl
        )

    @override
    def list_tensors(self, folder: Path) -> Listing:
        from mcore_ckpt_ext.formats.hugging_face.listing import list_model

        return list_model(folder)

    @override
    def lay_out(self, checkpoint: CheckpointView, target: HuggingFace, family: Family | None) -> OutputPlan:
        from mcore_ckpt_ext.formats.hugging_face.writer import lay_out

        return lay_out(checkpoint, target, family)
