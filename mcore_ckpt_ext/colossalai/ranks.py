"""The ranks that hold one wrapper: all make the same call, and if it fails on one, it fails on all.

They need not be the whole job: two models can be on two halves of it. ColossalAI divides a Gemini job along three axes
(0.5.0, booster/plugin/gemini_plugin.py: ``ProcessGroupMesh`` of ZeRO, replicas and tensor parallelism), so an exchange
in one group of each axis, one after the other, reaches all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from mcore_ckpt_ext.collectives import TorchRanks, highest_of_all
from mcore_ckpt_ext.errors import ResumeRefusedError

Result = TypeVar("Result")


class Ranks(TorchRanks):
    """The ranks that hold one wrapper."""

    def same_call(
        self,
        call: str,
        arguments: Mapping[str, object],
        inspect_here: Callable[[], Result],
        untouched: str = "nothing was gathered",
    ) -> dict[int, Result]:
        """Make sure that every rank makes the same call with the same arguments, and that no rank refuses it.

        Args:
            call: the call on this rank.
            arguments: arguments that must be equal on all ranks.
            inspect_here: raises if this rank refuses the call; it must not communicate.
            untouched: the state in which a refusal leaves the job.

        Returns:
            The results of `inspect_here`, by rank.

        Raises:
            ResumeRefusedError: on all ranks, with the reasons of all.
        """

        def own() -> tuple[dict[str, str], Result]:
            inspected = inspect_here()
            return {"call": call, **{name: repr(value) for name, value in arguments.items()}}, inspected

        answers = self.agree_by_rank(own, f"calling {call}", untouched)
        calls = {rank: made for rank, (made, _) in answers.items()}
        for name in dict.fromkeys(name for rank_call in calls.values() for name in rank_call):
            if len({rank_call.get(name) for rank_call in calls.values()}) > 1:
                differences = ", ".join(
                    f"rank {rank}: {rank_call.get(name, 'not given')}" for rank, rank_call in calls.items()
                )
                raise ResumeRefusedError(
                    f"the ranks call with different arguments ({name}); {untouched}",
                    found=differences,
                    expected="the same call on every rank",
                )
        return {rank: inspected for rank, (_, inspected) in answers.items()}

    def stop_if_any_failed(self, failure: BaseException | None, phase: str, consequence: str) -> None:
        """Raise on all ranks if one has failed since the last call; a single number is exchanged if none has.

        Raises:
            ResumeRefusedError: on all ranks, if one failed.
        """
        failed = [int(failure is not None)]
        for group in self.groups:
            failed = highest_of_all(failed, group)
        if not any(failed):
            return

        def own() -> None:
            if failure is not None:
                raise failure

        self.agree(own, phase, consequence)


class GroupErrors:
    """Collects a failure of one rank between two collectives, and raises it on all ranks when they meet.

    Args:
        ranks: the ranks that meet.
        phase: names the work in the message.
        consequence: the state in which a failure leaves the job.
    """

    def __init__(self, ranks: Ranks, phase: str, consequence: str) -> None:
        self._ranks = ranks
        self._phase = phase
        self._consequence = consequence
        self.failure: BaseException | None = None

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """Return the result of `work`, which must not communicate; None if it, or an earlier call, failed."""
        if self.failure is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - any error has to be reported to the other ranks
                self.failure = error
        return None

    def meet(self) -> None:
        """Continue on all ranks, or raise on all.

        Raises:
            ResumeRefusedError: on all ranks, if one has failed since they last met.
        """
        self._ranks.stop_if_any_failed(self.failure, self._phase, self._consequence)
