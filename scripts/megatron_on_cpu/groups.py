"""Process groups of a job that comes to its end before its process does."""

from __future__ import annotations

import torch


def leave_groups() -> None:
    """End all process groups but the world's.

    Megatron's `destroy_model_parallel` only forgets them, and each keeps threads that look for work.
    """
    groups = torch.distributed.distributed_c10d._world.pg_map
    for group in [group for group in groups if group is not torch.distributed.group.WORLD]:
        torch.distributed.destroy_process_group(group)
