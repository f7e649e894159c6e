"""The declaration of `torch_dcp`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from mcore_ckpt_ext.formats.backend import is_finished
from mcore_ckpt_ext.formats.format import Format, OpenOptions
from mcore_ckpt_ext.formats.target import Target

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.reader import FormatReader


class TorchDcpFormat(Format[Target]):
    """Megatron's `torch_dcp`, of jobs with `--use-torch-fsdp2`."""

    name = "torch_dcp"
    takes_facts = True

    @override
    def recognizes(self, folder: Path) -> bool:
        from mcore_ckpt_ext.formats.plain_dcp import plain_backend

        return plain_backend(folder) == self.name or is_finished(folder, self.name)

    @override
    def open(self, folder: Path, options: OpenOptions) -> FormatReader:
        from mcore_ckpt_ext.formats.torch_dcp.reader import TorchDcpCheckpoint

        return TorchDcpCheckpoint(folder, options.order_sources, options.facts)
