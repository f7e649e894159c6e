"""The rows that fill a vocabulary up: no part of a model's file, but the optimizer changes them and the loss sees them.

ColossalAI (0.5.0, shardformer/layer/embedding.py and linear.py) pads the vocabulary to a multiple of
``make_vocab_size_divisible_by`` and of the tensor-parallel ranks. The optimizer's files carry the rows' masters and
moments beside the others, for a job that pads alike.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from mcore_ckpt_ext.colossalai import tensor_parallel


def fitting(parameter: Any, where: str, rows: torch.Tensor | None) -> torch.Tensor | None:
    """Rows of padding as they are to be here; None where there are none here.

    Args:
        parameter: says how its vocabulary is padded here.
        where: which state of which parameter it is, for the message.
        rows: those of the file, if it has any. Where they do not fit, that is said, and the rows begin at zero, as
            ColossalAI makes them.
    """
    expected = tensor_parallel.padding_shape(parameter)
    if rows is not None and rows.shape != expected:
        here = "not at all" if expected is None else f"by {expected[parameter._padding_dim]} rows"
        logging.getLogger("mcore_ckpt_ext").warning(
            "%s: %d rows of padding of the vocabulary are dropped, since it is padded %s here; the next losses differ "
            "by what they add to the loss", where, len(rows), here,
        )  # fmt: skip
        rows = None
    return rows if rows is not None or expected is None else torch.zeros(expected)
