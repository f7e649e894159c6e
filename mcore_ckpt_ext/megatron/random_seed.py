"""Seeds random states from `--seed` and the iteration where no rank finds its own.

Where tensor or pipeline parallel size has changed, a checkpoint has no random state for a rank: Megatron then goes on
with what initialization has set from `--seed`, so that each restart draws the same dropout masks once more.

Sources: `get_rng_state` and `load_checkpoint`, megatron/training/checkpointing.py, and `_set_random_seed`,
megatron/training/initialize.py, core_v0.7.0 to 0.19.2 and the development head of August 2026.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from zlib import crc32

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.patching.singletons import PROCESS
from mcore_ckpt_ext.settings import RANDOM_STATES, STOCK


class Seeding:
    """The call with which Megatron has seeded the random generators of this process.

    Attributes:
        repeat: makes the call again with another seed; None before Megatron has made it.
    """

    repeat: Callable[[int], object] | None = None


def wrap_set_random_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_set_random_seed`, whose further arguments differ between releases."""

    @functools.wraps(original)
    def _set_random_seed(seed_: int, *positional: Any, **keywords: Any) -> Any:
        PROCESS.one(Seeding).repeat = lambda seed: original(seed, *positional, **keywords)
        return original(seed_, *positional, **keywords)

    return _set_random_seed


def has_other_grid(written: JobArguments, running: JobArguments) -> bool:
    """Return True if tensor or pipeline parallel size has changed; False if one is unknown.

    Args:
        written: the arguments of the job that saved the checkpoint.
        running: the arguments of the job that resumes it.
    """
    old, new = (ParallelLayout.from_arguments(job).known_sizes() for job in (written, running))
    return any(None not in (old[name], new[name]) and old[name] != new[name] for name in ("tensor", "pipeline"))


def seed_at(seed: int, iteration: int) -> int:
    """Return a positive seed of 31 bits; Megatron adds the numbers of ranks to it."""
    return crc32(f"{seed} {iteration}".encode()) // 2 + 1


def seed_again(arguments: Any, iteration: int) -> bool:
    """Seed the random generators of this process as Megatron does, with a seed of an iteration.

    `--seed` stays as it is, because the order of the data depends on it.

    Args:
        arguments: Megatron's arguments.
        iteration: the iteration from which training goes on.

    Returns:
        False if the user wants none loaded, or those of stock, or if the loop did not seed them by Megatron's function.
    """
    repeat = PROCESS.one(Seeding).repeat
    if repeat is None or arguments.no_load_rng or RANDOM_STATES.choose(arguments) == STOCK:
        return False
    repeat(seed_at(arguments.seed, iteration))
    return True
