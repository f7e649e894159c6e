"""The ranks that hold one wrapper, and how they agree: all make the same call, and what fails on one fails on all.

They need not be the whole job: two models can live on two halves of it. ColossalAI cuts a Gemini job along three axes
(0.5.0, booster/plugin/gemini_plugin.py: ``ProcessGroupMesh`` of ZeRO, replicas and tensor parallelism), so an exchange
in one group of each axis after the other reaches everyone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mcore_ckpt_ext.collectives import agreed_among
from mcore_ckpt_ext.errors import ResumeRefusedError
from mcore_ckpt_ext.group_device import control_device

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """The ranks that hold one wrapper.

    Args:
        groups: this rank's process group of each axis; None is the default group.
    """

    groups: tuple[Any, ...]

    def gather(self, item: Result) -> dict[int, Result]:
        """An item of every rank, by its rank in the job."""
        known = {dist.get_rank(): item}
        for group in self.groups:
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, known, group=group)
            known = {rank: found for part in parts for rank, found in part.items()}
        return dict(sorted(known.items()))

    def agreed(self, phase: str, work: Callable[[], Result], consequence: str) -> dict[int, Result]:
        """Do `work`, which must not communicate, on every rank; the results of all.

        Raises:
            ResumeRefusedError: on all ranks, if it failed on one; the message holds `consequence` and the reasons.
        """
        return agreed_among(self.gather, phase, work, consequence)

    def same_call(
        self, call: str, arguments: Mapping[str, object], inspect_here: Callable[[], Result],
        untouched: str = "nothing was gathered",
    ) -> dict[int, Result]:  # fmt: skip
        """Make sure that every rank does the same thing with the same arguments, and that nothing stands against it.

        Args:
            call: what this rank was asked to do.
            arguments: what has to be the same on all ranks.
            inspect_here: raises what stands against it here; it must not communicate.
            untouched: the state in which a refusal leaves the job.

        Returns:
            What `inspect_here` found, by rank.

        Raises:
            ResumeRefusedError: on all ranks, with the reasons of all.
        """

        def own() -> tuple[dict[str, str], Result]:
            found = inspect_here()
            return {"call": call, **{name: repr(value) for name, value in arguments.items()}}, found

        answers = self.agreed(f"calling {call}", own, untouched)
        calls = {rank: made for rank, (made, _) in answers.items()}
        for name in dict.fromkeys(name for one in calls.values() for name in one):
            if len({one.get(name) for one in calls.values()}) > 1:
                found = ", ".join(f"rank {rank}: {one.get(name, 'not given')}" for rank, one in calls.items())
                raise ResumeRefusedError(
                    f"the ranks call with different arguments ({name}); {untouched}",
                    found=found,
                    expected="the same call on every rank",
                )
        return {rank: found for rank, (_, found) in answers.items()}

    def stop_if_any_failed(self, failure: BaseException | None, phase: str, consequence: str) -> None:
        """Tell the others whether this rank failed since they last met; one number travels as long as none did.

        Raises:
            ResumeRefusedError: on all ranks, if one failed.
        """
        failed = torch.tensor([int(failure is not None)], dtype=torch.int32, device="cpu")
        for group in self.groups:
            failed = failed.to(control_device(group))
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
        if not failed.item():
            return

        def own() -> None:
            if failure is not None:
                raise failure

        self.agreed(phase, own, consequence)


class GroupErrors:
    """A failure of one rank between two collectives ends all ranks when they next meet, so that nobody waits for it.

    Args:
        ranks: who meets.
        phase: what is being done, for the message.
        consequence: the state in which a failure leaves the job.
    """

    def __init__(self, ranks: Ranks, phase: str, consequence: str) -> None:
        self._ranks, self._phase, self._consequence = ranks, phase, consequence
        self.failure: BaseException | None = None

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """The result of `work`, which must not communicate; None if it failed, or something did before."""
        if self.failure is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks have to hear of it
                self.failure = error
        return None

    def meet(self) -> None:
        """Go on together, or not at all.

        Raises:
            ResumeRefusedError: on all ranks, if one has failed since they last met.
        """
        self._ranks.stop_if_any_failed(self.failure, self._phase, self._consequence)
