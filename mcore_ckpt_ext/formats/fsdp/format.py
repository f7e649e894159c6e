"""The declaration of `fsdp_dtensor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.backend import is_finished
from mcore_ckpt_ext.formats.format import Format, OpenOptions
from mcore_ckpt_ext.formats.fsdp.options import FsdpDtensor

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.family import Family
    from mcore_ckpt_ext.formats.laid_out import OutputPlan
    from mcore_ckpt_ext.formats.reader import FormatReader
    from mcore_ckpt_ext.formats.view import CheckpointView


class FsdpDtensorFormat(Format[FsdpDtensor]):
    """Megatron-FSDP's `fsdp_dtensor`."""

    name = "fsdp_dtensor"
    target = FsdpDtensor
    takes_facts = True

    @override
    def recognizes(self, folder: Path) -> bool:
        from mcore_ckpt_ext.formats.plain_dcp import plain_backend

        return plain_backend(folder) == self.name or is_finished(folder, self.name)

    @override
    def own_files(self, folder: Path) -> tuple[str, ...]:
        return (r"\.metadata|__\d+_\d+\.distcp",)

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.fsdp.reader import FsdpCheckpoint

        return FsdpCheckpoint(folder, options.order_sources, options.facts)

    @override
    def lay_out(self, checkpoint: CheckpointView, target: FsdpDtensor, family: Family | None) -> OutputPlan:
        from mcore_ckpt_ext.formats.fsdp.writer import lay_out

        return lay_out(checkpoint, target)
