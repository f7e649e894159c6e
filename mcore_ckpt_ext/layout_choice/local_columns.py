"""The parameters of one rank as columns of numbers, which thousands of layouts are worked out from."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
BEFORE_LAYERS, AFTER_LAYERS = -1, -2
"""The places of what no decoder layer holds; see `Parameter`."""


@dataclass(frozen=True, slots=True)
class LocalColumns:
    """The parameters of one rank, all pipeline stages together: an element of each array for each parameter.

    Attributes:
        elements: of the rank's part.
        rows: of the part, and `columns`: where it is a matrix; 0 otherwise.
        columns: likewise.
        state: bytes of optimizer state.
        is_matrix: what Muon steps: two axes, and no row for every token (`is_managed_by_layer_wise_optimizer`,
            megatron/core/optimizer/layer_wise_optimizer.py).
        place: as in `Parameter`.
        is_embedding: it has a row for every token, and stands before the layers.
    """

    elements: Numbers
    rows: Numbers
    columns: Numbers
    state: Numbers
    is_matrix: Flags
    place: Numbers
    is_embedding: Flags

    def chosen(self, chosen: Flags | Numbers) -> LocalColumns:
        """Some of the parameters, by a mask or by their numbers."""
        return LocalColumns(*(getattr(self, field.name)[chosen] for field in fields(self)))
