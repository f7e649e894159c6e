"""The declaration of `torch_dist`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.backend import CONFIG_FILE, is_finished
from mcore_ckpt_ext.formats.format import Format, OpenOptions
from mcore_ckpt_ext.formats.torch_dist.options import TorchDist
from mcore_ckpt_ext.storage.index_entries import METADATA_FILE

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.family import Family
    from mcore_ckpt_ext.formats.laid_out import OutputPlan
    from mcore_ckpt_ext.formats.reader import FormatReader
    from mcore_ckpt_ext.formats.view import CheckpointView


class TorchDistFormat(Format[TorchDist]):
    """Megatron's `torch_dist`."""

    name = "torch_dist"
    target = TorchDist
    takes_facts = True
    required_files = (CONFIG_FILE, METADATA_FILE)

    @override
    def recognizes(self, folder: Path) -> bool:
        return is_finished(folder, self.name)

    @override
    def own_files(self, folder: Path) -> tuple[str, ...]:
        return (r"\.metadata|metadata\.json|common\.pt|__\d+_\d+\.distcp",)

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.torch_dist.reader import TorchDistCheckpoint

        return TorchDistCheckpoint(folder, options.order_sources, options.facts)

    @override
    def lay_out(self, checkpoint: CheckpointView, target: TorchDist, family: Family | None) -> OutputPlan:
        from mcore_ckpt_ext.formats.torch_dist.writer import lay_out

        return lay_out(checkpoint, target)
