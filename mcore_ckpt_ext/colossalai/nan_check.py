"""Detects NaN in masters when they are saved, and not only when they are loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mcore_ckpt_ext.colossalai.wrapper import Place, Wrapped
from mcore_ckpt_ext.errors import CheckpointError


def refuse_nan(zero: Wrapped, places: Mapping[nn.Parameter, Place]) -> None:
    """Refuse NaN in this rank's part of the parameters.

    Raises:
        CheckpointError: a parameter contains NaN; the error names the first one.
    """
    for chunk in {id(place.chunk): place.chunk for place in places.values()}.values():
        # One pass without extra memory; infinities of both signs also sum to NaN, so check the parameters themselves.
        if not torch.isnan(chunk.payload.sum()):
            continue
        for parameter, place in places.items():
            held, first, _ = place.local()
            if place.chunk is chunk and bool((broken := torch.isnan(held)).any()):
                raise CheckpointError(
                    "a parameter contains NaN",
                    found=f"{int(broken.sum())} NaN, the first at element {first + int(broken.nonzero()[0, 0])}",
                    where=" = ".join(zero.names[parameter]),
                    hint="go back to an earlier checkpoint; state_dict(strict=False) returns the values unchecked",
                )
