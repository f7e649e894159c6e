"""Base class of the readers of transformers and peft folders, which contain no training state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from typing_extensions import override

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.hugging_face.weights import ModelSpaceWeights
from mcore_ckpt_ext.formats.reader import FormatReader
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.array_location import QuantizedMatrix, RawArray


class WeightsAlone(FormatReader):
    """Reads a folder that contains only weights."""

    is_of_job = False
    kind: ClassVar[str]
    """Its name in messages."""
    _weights: ModelSpaceWeights

    @property
    @override
    def is_release(self) -> bool:
        return True

    @property
    @override
    def weights(self) -> ModelSpaceWeights:
        return self._weights

    @property
    def stored_optimizer_format(self) -> str | None:
        """None, because there is no optimizer."""
        return None

    @property
    @override
    def optimizer(self) -> OptimizerState:
        raise UnsupportedCheckpointError(f"{self.kind} holds no optimizer", where=str(self.folder))

    @property
    @override
    def has_expert_optimizer(self) -> bool:
        return False

    @override
    def param_groups(self) -> list[dict[str, Any]]:
        return []

    @override
    def grad_scaler(self) -> dict[str, Any] | None:
        return None

    @override
    def random_states(self) -> Mapping[tuple[int, ...], Any]:
        return {}

    @override
    def archives(self) -> Iterator[tuple[str, int, int]]:
        files = {
            stored.extent.file
            for _, stored in self._weights.matched
            if not isinstance(stored.extent, (RawArray, QuantizedMatrix))
        }
        return ((file, 0, self.reader.size(file)) for file in sorted(files))
