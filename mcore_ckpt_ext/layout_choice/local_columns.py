"""The parameters of one rank as columns of numbers, to evaluate thousands of layouts quickly."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
BEFORE_LAYERS = -1
AFTER_LAYERS = -2
"""The places of parameters outside the decoder layers; see `Parameter`."""


@dataclass(frozen=True, slots=True)
class LocalColumns:
    """The parameters of one rank, all pipeline stages together; arrays have one element for each.

    Attributes:
        elements: number of elements of the rank's part.
        rows: rows of the part if it is a matrix, otherwise 0.
        columns: columns of the part if it is a matrix, otherwise 0.
        state: bytes of optimizer state.
        is_matrix: whether Muon updates it: it has two axes, and no row for every token
            (`is_managed_by_layer_wise_optimizer`, megatron/core/optimizer/layer_wise_optimizer.py).
        place: the same as in `Parameter`.
        is_embedding: whether it has a row for every token and precedes the layers.
    """

    elements: Numbers
    rows: Numbers
    columns: Numbers
    state: Numbers
    is_matrix: Flags
    place: Numbers
    is_embedding: Flags

    def select(self, selection: Flags | Numbers) -> LocalColumns:
        """Return some of the parameters, by a mask or by their numbers."""
        return LocalColumns(*(getattr(self, field.name)[selection] for field in fields(self)))
