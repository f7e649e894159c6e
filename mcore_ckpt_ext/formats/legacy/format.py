"""The declaration of the legacy format `torch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.format import Format, OpenOptions
from mcore_ckpt_ext.formats.legacy.options import Legacy

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.family import Family
    from mcore_ckpt_ext.formats.laid_out import OutputPlan
    from mcore_ckpt_ext.formats.reader import FormatReader
    from mcore_ckpt_ext.formats.view import CheckpointView


class LegacyFormat(Format[Legacy]):
    """Megatron's legacy format `torch`."""

    name = "legacy"
    target = Legacy

    @override
    def recognizes(self, folder: Path) -> bool:
        from mcore_ckpt_ext.formats.legacy.reader import is_legacy

        return is_legacy(folder)

    @override
    def own_files(self, folder: Path) -> tuple[str, ...]:
        return (r"mp_rank_[\d_]+/(model_optim_rng|model_rng|distrib_optim|optim|layer_wise_optimizer_\d+)\.pt",)

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.legacy.reader import LegacyCheckpoint

        return LegacyCheckpoint(folder, options.order_sources)

    @override
    def lay_out(self, checkpoint: CheckpointView, target: Legacy, family: Family | None) -> OutputPlan:
        from mcore_ckpt_ext.formats.legacy.writer import lay_out

        return lay_out(checkpoint, target)
