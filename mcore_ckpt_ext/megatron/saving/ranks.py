"""The ranks of a running job, as the coordinator uses them."""

from __future__ import annotations

import torch.distributed as dist

from mcore_ckpt_ext.collectives import TorchRanks, highest_of_all, reasons_of_all
from mcore_ckpt_ext.errors import SaveFailedError
from mcore_ckpt_ext.megatron.saving.save import Point


class JobRanks(TorchRanks):
    """The ranks of torch.distributed's default group, or a single rank without it."""

    def agree_on(self, point: Point, problem: str | None) -> str | None:
        """Exchange problems with all ranks; only three numbers are exchanged if there is none.

        Raises:
            SaveFailedError: on every rank, if the ranks are at different points.
        """
        if not dist.is_initialized():
            return problem
        numbers = [int(problem is not None), point.value, -point.value]
        is_problem, last, first = highest_of_all(numbers)
        if last != -first:
            names = f"{Point(-first).name} and {Point(last).name}"
            raise SaveFailedError("the ranks of the job are at different points of saving", found=names)
        return reasons_of_all(problem) if is_problem else None

    def barrier(self) -> None:
        """Call a barrier in place of Megatron's."""
        dist.barrier()
