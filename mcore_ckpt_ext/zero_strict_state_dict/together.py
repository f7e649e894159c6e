"""All ranks make the same call, and a refusal on one is the refusal of all, before any chunk travels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from mcore_ckpt_ext.errors import CheckpointError, ResumeRefusedError
from mcore_ckpt_ext.online.agreement import agreed
from mcore_ckpt_ext.zero_strict_state_dict.wrapper import Place, Wrapped


def agree(
    call: str, arguments: Mapping[str, object], look: Callable[[], object], untouched: str = "nothing was gathered"
) -> None:
    """Make sure that every rank does the same thing with the same arguments, and that nothing speaks against it.

    Args:
        call: what this rank was asked to do.
        arguments: what has to be the same on all ranks.
        look: raises what speaks against it here; it must not communicate.
        untouched: in which state a refusal leaves the job.

    Raises:
        ResumeRefusedError: on all ranks, with the reasons of all.
    """

    def own() -> dict[str, str]:
        look()
        return {"call": call, **{name: repr(value) for name, value in arguments.items()}}

    calls = agreed(f"calling {call}", own, untouched)
    names = dict.fromkeys(name for one in calls for name in one)
    for name in names:
        answers = {one.get(name) for one in calls}
        if len(answers) > 1:
            found = ", ".join(f"rank {rank}: {one.get(name, 'not given')}" for rank, one in enumerate(calls))
            raise ResumeRefusedError(
                f"the ranks call with different arguments ({name}); {untouched}",
                found=found,
                expected="the same call on every rank",
            )


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
                "a parameter's values are not numbers",
                found=f"{int(broken.sum())} NaN, the first at element {first + int(broken.nonzero()[0, 0])}",
                where=" = ".join(zero.names[parameter]),
                helps="go back to an earlier checkpoint; state_dict(strict=False) gives the values as they are",
            )
