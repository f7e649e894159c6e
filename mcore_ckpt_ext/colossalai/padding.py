"""Padding rows of a vocabulary, which model files omit, but the optimizer updates and the loss uses.

ColossalAI (0.5.0, shardformer/layer/embedding.py and linear.py) pads the vocabulary to a multiple of
``make_vocab_size_divisible_by`` and of the number of tensor-parallel ranks. The optimizer's files also contain the
masters and moments of these rows, for a job with the same padding.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from mcore_ckpt_ext.colossalai import tensor_parallel
from mcore_ckpt_ext.errors import quantity


def fit_padding(parameter: Any, where: str, rows: torch.Tensor | None) -> torch.Tensor | None:
    """Return the padding rows for this job; None if it has none.

    Args:
        parameter: a parameter with its padding.
        where: the state and the parameter, for the message.
        rows: the rows in the file, or None. If they do not fit, a warning is logged, and the rows begin at zero, as in
            ColossalAI.
    """
    expected = tensor_parallel.padding_shape(parameter)
    if rows is not None and rows.shape != expected:
        here = "not at all" if expected is None else f"by {quantity(expected[parameter._padding_dim], 'row')}"
        logging.getLogger("mcore_ckpt_ext").warning(
            "%s: %s dropped, since it is padded %s here; the next losses differ by what they add to the loss",
            where,
            quantity(len(rows), "row of padding of the vocabulary is", "rows of padding of the vocabulary are"),
            here,
        )
        rows = None
    return rows if rows is not None or expected is None else torch.zeros(expected)
