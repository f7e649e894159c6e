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

        def inspected_call() -> tuple[dict[str, str], Result]:
            inspected = inspect_here()
            return {"call": call, **{name: repr(value) for name, value in arguments.items()}}, inspected

        answers = self.agree_by_rank(inspected_call, f"calling {call}", untouched)
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

    def is_writer(self) -> bool:
        """Return True on the first of the ranks, which need not be rank 0 of the job; all must call this."""
        return self.rank == min(self.items_by_rank(None))


class GroupErrors:
    """Collects a failure of one rank between two collectives, to raise it on all ranks.

    Args:
        ranks: the ranks that raise.
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

    def raise_on_all(self) -> None:
        """Continue on all ranks, or raise on all; they exchange a number if none has failed.

        Raises:
            ResumeRefusedError: on all ranks, if one has failed.
        """
        failed = [int(self.failure is not None)]
        for group in self._ranks.groups:
            failed = highest_of_all(failed, group)
        if any(failed):
            self._ranks.agree(self._raise, self._phase, self._consequence)

    def _raise(self) -> None:
        if self.failure is not None:
            raise self.failure
