"""The ranks of a running job, as saving sees them."""

from __future__ import annotations

import torch.distributed as dist

from mcore_ckpt_ext.collectives import highest_of_all, is_first_rank, reasons_of_all
from mcore_ckpt_ext.errors import SaveFailedError
from mcore_ckpt_ext.megatron.saving.save import Point


class JobRanks:
    """Those of torch.distributed's default group, or the only one where there is none."""

    @property
    def is_first(self) -> bool:
        """Whether this rank publishes."""
        return is_first_rank()

    def agree(self, point: Point, problem: str | None) -> str | None:
        """Meet; only three numbers are exchanged as long as all is well.

        Raises:
            SaveFailedError: on every rank, when they are at different points, so that none knows what the others mean.
        """
        if not dist.is_initialized():
            return problem
        own = [int(problem is not None), point.value, -point.value]
        is_problem, last, first = highest_of_all(own)
        if last != -first:
            names = f"{Point(-first).name} and {Point(last).name}"
            raise SaveFailedError("the ranks of the job are at different points of saving", found=names)
        return reasons_of_all(problem) if is_problem else None

    def barrier(self) -> None:
        """Stand in for one of Megatron's."""
        dist.barrier()
