"""Base class of the readers of transformers and peft folders, which contain no training state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from typing_extensions import override

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.hugging_face.weights import ModelSpaceWeights
from mcore_ckpt_ext.formats.parts import Files, Job, StoredOptimizer
from mcore_ckpt_ext.formats.reader import FormatReader
from mcore_ckpt_ext.formats.view import OpenedFormat
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.array_location import QuantizedMatrix, RawArray


class WeightsAlone(FormatReader):
    """Reads a folder that contains only weights.

    Attributes:
        kind: its name in messages.
    """

    kind: ClassVar[str]
    _weights: ModelSpaceWeights

    @cached_property
    @override
    def format(self) -> OpenedFormat:
        return replace(super().format, is_of_job=False, foreign_writer=f"no Megatron: it is {self.kind}")

    @cached_property
    @override
    def files(self) -> Files:
        return replace(super().files, archives=self._archives)

    @cached_property
    @override
    def optimizer(self) -> StoredOptimizer:
        return StoredOptimizer(self._refuse_optimizer)

    @cached_property
    @override
    def job(self) -> Job:
        return replace(super().job, is_release=True)

    def _refuse_optimizer(self) -> OptimizerState:
        raise UnsupportedCheckpointError(f"{self.kind} holds no optimizer", where=str(self.folder))

    def _archives(self) -> Iterator[tuple[str, int, int]]:
        files = {
            stored.extent.file
            for _, stored in self._weights.matched
            if not isinstance(stored.extent, (RawArray, QuantizedMatrix))
        }
        return ((file, 0, self.files.reader.size(file)) for file in sorted(files))
