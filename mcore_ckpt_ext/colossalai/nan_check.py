"""Detects NaN in masters when they are saved, and not only when they are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
        if torch.isnan(chunk.payload.sum()):
            _refuse_nan_in(zero, ((p, place) for p, place in places.items() if place.chunk is chunk))


def _refuse_nan_in(zero: Wrapped, members: Iterable[tuple[nn.Parameter, Place]]) -> None:
    for parameter, place in members:
        held, first, _ = place.local()
        broken = torch.isnan(held)
        if bool(broken.any()):
            raise CheckpointError(
                "a parameter contains NaN",
                found=f"{int(broken.sum())} NaN, the first at element {first + int(broken.nonzero()[0, 0])}",
                where=" = ".join(zero.names[parameter]),
                hint="go back to an earlier checkpoint; state_dict(strict=False) returns the values unchecked",
            )
