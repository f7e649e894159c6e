"""Serves loads by any training loop through patches of Megatron Core, which all loops call.

A program requests the optimizer's sharded state dict (`is_loading=True`), passes it to `dist_checkpointing.load`, and
passes the result to the optimizer's `load_state_dict` (megatron/core/optimizer/distrib_optimizer.py, optimizer.py,
dist_checkpointing/serialization.py; core_v0.12.1 to 0.19.2 and the development head of August 2026). The wrapper of the
first marks the request. The wrapper of the second decides from the checkpoint whether Megatron itself loads it; if not,
it plans the resume and returns the plan in place of the state. The wrapper of the third verifies the plan against the
live weights and fills the optimizer. Nothing is changed before, so a program that loads in two calls, or in another
order, is served or refused as a whole.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.collectives import agree, gather, is_first_rank, rank_and_size
from mcore_ckpt_ext.continuity.data_order import order_in_another_loop
from mcore_ckpt_ext.continuity.order_change import CHANGES, DataOrder
from mcore_ckpt_ext.errors import CheckpointError, UnsupportedCheckpointError, format_ranks
from mcore_ckpt_ext.formats.checkpoint import Checkpoint
from mcore_ckpt_ext.formats.views import is_before_first_step
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout, placement_changes
from mcore_ckpt_ext.megatron.core_save import PendingSave
from mcore_ckpt_ext.megatron.decision_facts import stored_groups
from mcore_ckpt_ext.megatron.live.arguments import chunks_of, live_arguments
from mcore_ckpt_ext.megatron.live.compatibility import check_adapters
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import (
    Chain,
    is_offloaded,
    is_precision_aware,
    keeps_remainders,
)
from mcore_ckpt_ext.megatron.live.resume import ResumeOptions
from mcore_ckpt_ext.megatron.load_assessment import explain, with_order_compared
from mcore_ckpt_ext.megatron.load_facts import LoadFacts, Loop
from mcore_ckpt_ext.megatron.load_request import (
    LoadPlan,
    LoadRequest,
    check_lists,
    is_stored_alike,
    requests_in,
    with_plans,
    without,
)
from mcore_ckpt_ext.megatron.load_session import LoadSession, session_at
from mcore_ckpt_ext.megatron.policy import LoadDecision, decide
from mcore_ckpt_ext.megatron.presentation import lacks_common_file
from mcore_ckpt_ext.megatron.random_states import lacks_requested_states, with_live_random_states
from mcore_ckpt_ext.megatron.required_order import check_required_order
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.megatron.stored_layers import request_stored_layers
from mcore_ckpt_ext.megatron.unchecked_loads import UncheckedLoads
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.optimizer_reshard import prepare
from mcore_ckpt_ext.optimizers.table import may_be_shifted
from mcore_ckpt_ext.optimizers.unsupported import has_remainders
from mcore_ckpt_ext.optimizers.workarounds.fully_reshardable_padding import masters_hold
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.patch_point import Function
from mcore_ckpt_ext.patching.reentrancy import ReentrancyGuard
from mcore_ckpt_ext.patching.singletons import PROCESS
from mcore_ckpt_ext.settings import ACCEPT_LOST, READ_ONCE, VERIFY_ALL

_SAMPLES = 512
# The layout of the job that saved is unknown without these sizes.
_PLACING = ("tensor", "pipeline", "virtual_pipeline", "expert")


def wrap_sharded_state_dict(original: Function) -> Function:
    """Wrap an optimizer's `sharded_state_dict`: mark the request of a load, and record that of a save."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def sharded_state_dict(self: Any, *positional: Any, **keywords: Any) -> Any:
        state_dict = original(self, *positional, **keywords)
        call = signature.bind(self, *positional, **keywords)
        if not call.arguments.get("is_loading", False) or not isinstance(state_dict, dict):
            PROCESS.one(PendingSave).note(self, state_dict)
            return state_dict
        request = state_dict if isinstance(state_dict, LoadRequest) else LoadRequest(state_dict)
        request.optimizer = self  # the outermost optimizer of a chain sets it last
        return request

    return sharded_state_dict


def wrap_load(original: Function) -> Function:
    """Wrap `dist_checkpointing.load`: plan the resume of an optimizer that Megatron cannot load."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load(*positional: Any, **keywords: Any) -> Any:
        call = signature.bind(*positional, **keywords)
        tree = call.arguments["sharded_state_dict"]
        session = session_at(Path(str(call.arguments["checkpoint_dir"])))
        load_stored = request_stored_layers(original, session)
        requests = dict(requests_in(tree))
        part_of_ranks = call.arguments.get("process_group") is not None
        _check_is_readable(session.folder)
        # With this check Megatron compares the requests of all ranks, so that all ranks make this call.
        is_collective = bool(requests) or call.arguments.get("validate_access_integrity", True)
        if not is_collective or part_of_ranks or PROCESS.one(ReentrancyGuard).is_busy:
            return load_stored(*positional, **keywords)
        if lacks_requested_states(session, tree):
            announce("random states stay as they are: the checkpoint lacks some that this job requests")
            call.arguments["sharded_state_dict"] = with_live_random_states(tree)
        if not _all_request(session, list(requests.values())):
            return load_stored(*call.args, **call.kwargs)
        planned = [(path, _plan(session, request)) for path, request in requests.items()]
        plans = {path: plan for path, plan in planned if plan is not None}
        if not plans:
            return load_stored(*call.args, **call.kwargs)
        agree("looking at the checkpoint", lambda: check_lists(tree, plans.keys()))
        call.arguments["sharded_state_dict"] = without(call.arguments["sharded_state_dict"], plans.keys())
        return with_plans(load_stored(*call.args, **call.kwargs), plans)

    return load


def wrap_load_state_dict(original: Function) -> Function:
    """Wrap an optimizer's `load_state_dict`: verify a plan and fill the optimizer."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        if not isinstance(state_dict, LoadPlan):
            result = original(self, state_dict)
            PROCESS.one(UncheckedLoads).check(self)
            return result
        announce(f"{state_dict.prepared.prove().fill()}; {state_dict.order.sentence}")
        return None

    return load_state_dict


def serves(optimizer: Any) -> bool:
    """Return True if this module can fill the optimizer: it consists of DistributedOptimizers only."""
    chain = Chain.of(optimizer) if optimizer is not None else None
    return chain is not None and bool(chain.distributed) and not (chain.unknown or chain.whole)


def _check_is_readable(folder: Path) -> None:
    """Raise UnsupportedCheckpointError if this Megatron cannot read the common state."""
    if lacks_common_file(folder, megatron_version()):
        major, minor, *_ = megatron_version()
        raise UnsupportedCheckpointError(
            "a later release of Megatron Core wrote the checkpoint, and the running one cannot load it",
            found="no common.pt: since 0.19 the common state is an object of the index",
            where=str(folder),
            hint=f"mcore-ckpt convert {folder} OUTPUT --to torch_dist --megatron-version {major}.{minor}",
        )


def _all_request(session: LoadSession, requests: Sequence[LoadRequest]) -> bool:
    """Return True if every rank requests an optimizer; else Megatron has to load. Collective.

    Programs skip a rank's optimizer that trains no parameter: a stub, whose `sharded_state_dict` cannot be called
    (`MegatronOptimizer.is_stub_optimizer`, core_v0.12.1 to 0.19.2). They would not pass a loaded state to it either.

    Raises:
        ResumeRefusedError: on every rank, if some have no optimizer and Megatron cannot load that of the others.
    """
    has_request = gather(bool(requests))
    if all(has_request) or not any(has_request):
        return has_request[0]
    is_first_with_request = rank_and_size()[0] == has_request.index(True)

    def inspect_here() -> None:
        served = [request for request in requests if serves(request.optimizer)] if is_first_with_request else []
        if served and any(
            not _decide(session, request.optimizer, _fits(session, request)).is_stock for request in served
        ):
            ranks = format_ranks(rank for rank, has_one in enumerate(has_request) if not has_one)
            raise UnsupportedCheckpointError(
                "Megatron cannot load this optimizer, and some ranks have no optimizer",
                found=f"no optimizer on rank {ranks}, as happens if a rank trains no parameter",
                where=str(session.folder),
                hint="call mcore_ckpt_ext.load_optimizer(path, model, optimizer) on every rank, once the weights are "
                "loaded, in place of loading the optimizer's state",
            )

    agree("looking at the checkpoint", inspect_here)
    return False


def _plan(session: LoadSession, request: LoadRequest) -> LoadPlan | None:
    """Plan the resume of an optimizer that Megatron cannot load. Collective.

    Returns:
        The plan, or None if Megatron loads the optimizer.

    Raises:
        ResumeRefusedError: on every rank, if this package cannot fill the optimizer either, or if the user requires
            the order of the data.
    """
    optimizer = request.optimizer
    fits = all(agree("looking at the checkpoint", lambda: _fits(session, request)))

    def inspect_here() -> tuple[LoadDecision, bool, DataOrder] | None:
        """Return rank 0's decision, whether `UncheckedLoads` checks a load by Megatron, the data's order."""
        if not is_first_rank() or not serves(optimizer):
            return None
        arguments = session.checkpoint.job.arguments()
        order = order_in_another_loop(arguments, live_arguments(chunks_of(optimizer), optimizer))
        check_required_order(order, None, session.folder)
        return _decide(session, optimizer, fits), not session.checkpoint.names(WEIGHT), order

    rank0_decision = agree("looking at the checkpoint", inspect_here)[0]
    if rank0_decision is None:
        return None
    decision, is_unchecked, order = rank0_decision
    decision = with_order_compared(decision, session, lambda: chunks_of(optimizer), optimizer)
    explain(decision, session.folder)
    if decision.is_stock:
        if order.verdict == CHANGES:
            announce(order.sentence)
        if is_unchecked:
            PROCESS.one(UncheckedLoads).add(optimizer, session.folder)
        return None
    chunks = chunks_of(optimizer)
    running = live_arguments(chunks, optimizer)
    plan = LoadPlan()
    plan.order = order
    options = ResumeOptions(VERIFY_ALL.value, ACCEPT_LOST.value, READ_ONCE.value)
    plan.prepared = prepare(session, chunks, optimizer, running, options)
    return plan


def _fits(session: LoadSession, request: LoadRequest) -> bool:
    """Return True if the folder is readable and has every array that this rank requests, of equal size."""
    if not serves(request.optimizer):
        return True
    with suppress(CheckpointError):
        index = session.checkpoint.files.index()
        return index is not None and is_stored_alike(request, index)
    return False


def _decide(session: LoadSession, optimizer: Any, fits: bool) -> LoadDecision:
    """Decide who loads an optimizer that this package can fill.

    Args:
        session: the folder to load.
        optimizer: the live optimizer.
        fits: True if every rank finds the arrays that it requests, of equal sizes. If the stored layout is unknown,
            nothing else can be checked beforehand.
    """
    checkpoint = session.checkpoint
    if checkpoint.optimizer.format() is None:
        return LoadDecision(Loop.CORE)
    running = live_arguments(chunks_of(optimizer), optimizer)
    chain = Chain.of(optimizer)
    check_adapters(checkpoint, ParallelLayout.from_arguments(running), running)
    both = [_spelled_out(arguments) for arguments in (checkpoint.job.arguments(), running)]
    # The order in the buffers, if the sidecar has it, is compared afterwards (`with_order_compared`).
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
        is_shifted=lambda: _is_shifted(checkpoint),
        is_before_first_step=lambda: is_before_first_step(checkpoint),
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
