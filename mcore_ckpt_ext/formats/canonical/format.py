"""The declaration of `canonical`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.canonical.options import Canonical
from mcore_ckpt_ext.formats.format import Format, OpenOptions

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.family import Family
    from mcore_ckpt_ext.formats.laid_out import OutputPlan
    from mcore_ckpt_ext.formats.reader import FormatReader
    from mcore_ckpt_ext.formats.view import CheckpointView


class CanonicalFormat(Format[Canonical]):
    """The layout-free format of this package."""

    name = "canonical"
    is_iteration = False
    target = Canonical

    @override
    def recognizes(self, folder: Path) -> bool:
        from mcore_ckpt_ext.formats.canonical.reader import is_canonical

        return is_canonical(folder)

    @override
    def own_files(self, folder: Path) -> tuple[str, ...]:
        from mcore_ckpt_ext.formats.canonical.reader import CanonicalCheckpoint

        CanonicalCheckpoint(folder)  # checks the marker
        return (r"common\.json|model\.safetensors\.index\.json|canonical-\d+-of-\d+\.safetensors",)

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.canonical.reader import CanonicalCheckpoint

        return CanonicalCheckpoint(folder, options.order_sources)

    @override
    def lay_out(self, checkpoint: CheckpointView, target: Canonical, family: Family | None) -> OutputPlan:
        from mcore_ckpt_ext.formats.canonical.writer import lay_out

        return lay_out(checkpoint)
