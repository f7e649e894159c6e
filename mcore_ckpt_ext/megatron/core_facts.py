"""Collects the facts of a load by Megatron Core, from a live optimizer and what it requests."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from mcore_ckpt_ext.collectives import is_first_rank
from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.checkpoint import Checkpoint
from mcore_ckpt_ext.formats.views import is_before_first_step
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout, placement_changes
from mcore_ckpt_ext.megatron.decision_facts import stored_groups
from mcore_ckpt_ext.megatron.live.compatibility import check_adapters
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import (
    Chain,
    is_offloaded,
    is_precision_aware,
    keeps_remainders,
)
from mcore_ckpt_ext.megatron.load_facts import LoadFacts, Loop
from mcore_ckpt_ext.megatron.load_request import (
    LoadRequest,
    is_stored_alike,
)
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.policy import LoadDecision, decide
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.optimizers.table import may_be_shifted
from mcore_ckpt_ext.optimizers.unsupported import has_remainders
from mcore_ckpt_ext.optimizers.workarounds.fully_reshardable_padding import masters_hold

_SAMPLES = 512
# The layout of the job that saved is unknown without these sizes.
_PLACING = ("tensor", "pipeline", "virtual_pipeline", "expert")


def serves(optimizer: Any) -> bool:
    """Return True if this package can fill the optimizer: it consists of DistributedOptimizers only."""
    chain = Chain.of(optimizer) if optimizer is not None else None
    return chain is not None and bool(chain.distributed) and not (chain.unknown or chain.whole)


def finds_request(session: LoadSession, request: LoadRequest) -> bool:
    """Return True if the folder is readable and has every array that this rank requests, of equal size."""
    with suppress(CheckpointError):
        index = session.checkpoint.files.index()
        return index is not None and is_stored_alike(request, index)
    return False


def decision_on_request(session: LoadSession, optimizer: Any, running: JobArguments, *, fits: bool) -> LoadDecision:
    """Decide who loads an optimizer that this package can fill.

    Args:
        session: the folder to load.
        optimizer: the live optimizer.
        running: the arguments of the live job.
        fits: True if every rank finds the arrays that it requests, of equal sizes. If the stored layout is unknown,
            nothing else can be checked beforehand.

    Raises:
        CheckpointError: the job cannot resume the checkpoint, whatever its optimizer is.
    """
    checkpoint = session.checkpoint
    if checkpoint.optimizer.format() is None:
        return LoadDecision(Loop.CORE)
    chain = Chain.of(optimizer)
    check_adapters(checkpoint, ParallelLayout.from_arguments(running), running)
    both = [_spelled_out(arguments) for arguments in (checkpoint.job.arguments(), running)]
    # The order in the buffers, if the sidecar has it, is compared afterwards (`decision_phases.PARAMETER_ORDER`).
    by_arrays = checkpoint.job.found_sidecar().sidecar is not None or not checkpoint.job.layout.unknown.isdisjoint(
        _PLACING
    )
    facts = LoadFacts(
        Loop.CORE,
        megatron_version(),
        optimizer_format=checkpoint.optimizer.format(),
        is_moved=not fits if by_arrays else bool(placement_changes(*both)),
        chain=chain,
        written=checkpoint.job.arguments(),
        running=running,
        differing_arguments=lambda: _differing_arguments(checkpoint, chain),
        stored_groups=stored_groups(session),
        # One rank reads for all.
        is_shifted=lambda: is_first_rank() and _is_shifted(checkpoint),
        is_before_first_step=lambda: is_first_rank() and is_before_first_step(checkpoint),
    )
    return decide(facts)


def _differing_arguments(checkpoint: Checkpoint, chain: Chain) -> list[str]:
    """Return the optimizer's arguments that differ from the checkpoint's, if it has them."""
    kinds = {"optimizer_cpu_offload": is_offloaded, "use_precision_aware_optimizer": is_precision_aware}
    settings = {name: bool(value) for name, value in checkpoint.job.arguments().raw.items() if name in kinds}
    differing = [name for name, value in settings.items() if value != any(map(kinds[name], chain.distributed))]
    joins = any(map(keeps_remainders, chain.distributed))
    index = checkpoint.files.index()
    if index is not None and has_remainders(index) != joins:
        differing.append("store_param_remainders")
    return differing


def _is_shifted(checkpoint: Checkpoint) -> bool:
    """Return True if masters are stored under the names of other weights.

    See `optimizers/workarounds/fully_reshardable_padding.py`. Without weights in the same folder this cannot be seen
    here, and the load is checked afterwards.
    """
    is_possible = may_be_shifted(checkpoint.optimizer.format()) and bool(checkpoint.names(WEIGHT))
    return is_possible and not _is_as_named(checkpoint)


def _is_as_named(checkpoint: Checkpoint) -> bool:
    """Return True if sampled masters match the weights of the same names; a shift affects many of them."""
    with suppress(CheckpointError):  # stock Megatron may support a state that this package does not
        state = checkpoint.optimizer.state()
        named = checkpoint.names(FP32_PARAM)
        some = named[:: max(1, len(named) // _SAMPLES)]
        return not state.shifted and masters_hold(
            state,
            some,
            checkpoint.model.weights(),
            checkpoint.files.transfer,
            checkpoint.job.master_check.first_mismatch,
        )
    return True


def _spelled_out(arguments: JobArguments) -> JobArguments:
    """Fill in optional sizes: expert tensor parallelism as tensor parallelism, one virtual stage."""
    layout = ParallelLayout.from_arguments(arguments)
    return arguments.replace(
        expert_tensor_parallel_size=layout.expert_tensor, virtual_pipeline_model_parallel_size=layout.virtual_pipeline
    )
