"""A master that is not a number is noticed when it is saved, not when it is resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from mcore_ckpt_ext.colossalai.wrapper import Place, Wrapped
from mcore_ckpt_ext.errors import CheckpointError


def refuse_nan(zero: Wrapped, places: Mapping[nn.Parameter, Place]) -> None:
    """Look for NaN in what this rank holds.

    Raises:
        CheckpointError: there is one; it names the first such parameter.
    """
    for chunk in {id(place.chunk): place.chunk for place in places.values()}.values():
        # One pass without extra memory; infinities of both signs also sum to NaN, so the parameters decide.
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
