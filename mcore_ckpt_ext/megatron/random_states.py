"""Compares the random states that a Megatron job requests with those of a checkpoint.

Megatron's own loop decides from its arguments. Of another loop, only the request is known: an object of the key
`rng_state`, with the grid of ranks as its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from mcore_ckpt_ext.collectives import agree, is_first_rank
from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import GRID_OF_EXPERTS_HAS_DATA_RANKS, STARTS_RANDOM_STATES_ANEW
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.trees import leaves

_FOR_EACH_RANK = "data_parallel_random_init"
_KEY = "rng_state"
_PHASE = "looking at the random states"


def requested_grid(arguments: Any, version: tuple[int, int]) -> tuple[int, ...]:
    """Return the grid of random states that Megatron requests, by pipeline and tensor parallel rank.

    Source: `get_rng_state`, megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2 and the development head of
    August 2026. core_v0.16.0 and 0.16.1 add a third axis, data parallelism, with more than one expert-parallel rank.
    """
    grid = (arguments.pipeline_model_parallel_size, arguments.tensor_model_parallel_size)
    if GRID_OF_EXPERTS_HAS_DATA_RANKS.is_of(version) and arguments.expert_model_parallel_size > 1:
        return (*grid, arguments.data_parallel_size * arguments.context_parallel_size)
    return grid


def grid_may_differ(arguments: Any) -> bool:
    """Return True if the stored grid may differ although pipeline and tensor parallel sizes are equal.

    Only models with experts have ever had a third axis, so that no other load has to open an index for it.
    """
    return bool(getattr(arguments, "num_experts", None)) and not arguments.no_load_rng


def random_states_are_lacking(
    stored: tuple[int, ...] | None, arguments: Any, version: tuple[int, int], written: Mapping[str, Any]
) -> bool:
    """Return True if stock Megatron requests a random state that the checkpoint lacks, and fails.

    Since core_v0.14 it requests none if pipeline or tensor parallel size has changed; otherwise the load fails with
    "Missing key in checkpoint state_dict: rng_state/shard_...".

    Args:
        stored: the grid in the checkpoint; None if it has no random states (its arguments then say no_save_rng).
        arguments: Megatron's arguments.
        version: the version of the running megatron-core.
        written: the arguments of the job that saved, by name.
    """
    requested = requested_grid(arguments, version)
    is_requested = not STARTS_RANDOM_STATES_ANEW.is_of(version) or stored is None or stored[:2] == requested[:2]
    return is_requested and not written.get("no_save_rng") and stored != requested


def random_states_are_too_few(written: JobArguments, running: JobArguments) -> bool:
    """Return True if each rank requests its own random state and the checkpoint has fewer.

    Stock Megatron then fails with an IndexError.

    Source: `get_rng_state` and `load_checkpoint`, megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2.
    """
    stored, requested = (
        ParallelLayout.from_arguments(job).data if job.raw.get(_FOR_EACH_RANK) else 1 for job in (written, running)
    )
    return requested > stored


def lacks_requested_states(session: LoadSession, tree: Any) -> bool:
    """Return True if random states are requested of another grid than the stored one. Collective.

    Megatron then fails. The grid is the same for all ranks, so rank 0 alone reads the checkpoint's index.

    Source: `ShardedObject.unique_key`, megatron/core/dist_checkpointing/mapping.py, core_v0.12.1 to 0.19.2.

    Raises:
        ResumeRefusedError: on every rank, if rank 0 cannot read the index for a reason that Megatron does not report.
    """
    requested = set().union(*agree(_PHASE, lambda: set(grids_in(tree))))
    if not requested:
        return False
    stored = agree(_PHASE, lambda: _stored_grid(session) if is_first_rank() else None)[0]
    return stored is not None and requested != {stored}


def _stored_grid(session: LoadSession) -> tuple[int, ...] | None:
    with suppress(CheckpointError):  # Megatron reports a folder that it cannot load
        return session.checkpoint.states.random_grid()
    return None


def grids_in(tree: Any) -> Iterator[tuple[int, ...]]:
    """Yield the grids of the random states that a sharded state dict requests.

    Source: `get_rng_state`, megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2, and Megatron-Bridge's,
    megatron/bridge/training/checkpointing.py, 0.6.2, whose grid has a data-parallel axis with several expert ranks.
    """
    for leaf in leaves(tree):
        if getattr(leaf, "key", None) == _KEY and hasattr(leaf, "global_shape"):
            yield tuple(leaf.global_shape)


def with_live_random_states(tree: Any) -> Any:
    """Return a copy of a sharded state dict with random states of the live job, not of the checkpoint.

    A loop sets what it receives, so that the random states of the job stay as they are.

    Source: `LocalNonpersistentObject`, megatron/core/dist_checkpointing/mapping.py, core_v0.12.1 to 0.19.2.
    """
    if not any(True for _ in grids_in(tree)):
        return tree
    if isinstance(tree, dict):
        return {key: with_live_random_states(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [with_live_random_states(value) for value in tree]
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    return LocalNonpersistentObject(tree.data)
