"""Loads by any training loop, patched in Megatron Core's optimizer, which all loops call.

A program requests the optimizer's sharded state dict (`is_loading=True`), hands it to `dist_checkpointing.load`, and
the answer to the optimizer's `load_state_dict` (megatron/core/optimizer/distrib_optimizer.py, optimizer.py,
dist_checkpointing/serialization.py; core_v0.12.1 to 0.19.2 and the development head of August 2026). What the first
gives out is marked; the second sees from the checkpoint whether Megatron itself would load it, and if not, plans the
resume, and puts the plan where the answer would be; the third proves the plan against the live weights and fills. Until
then nothing is touched, so a program that loads in two calls, or in another order, is served or refused as a whole.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.collectives import agreed, gather, is_first_rank, rank_and_size
from mcore_ckpt_ext.errors import CheckpointError, UnsupportedCheckpointError, format_ranks
from mcore_ckpt_ext.formats.checkpoint import Checkpoint, open_checkpoint
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
from mcore_ckpt_ext.megatron.load_decision import explain, with_order_compared
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
from mcore_ckpt_ext.megatron.policy import LoadDecision, decide
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.megatron.unchecked_loads import UncheckedLoads
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.optimizer_reshard import prepare
from mcore_ckpt_ext.optimizers.model_space_formats import FULLY_RESHARDABLE
from mcore_ckpt_ext.optimizers.table import encodings_named
from mcore_ckpt_ext.optimizers.unsupported import has_remainders
from mcore_ckpt_ext.optimizers.workarounds.fully_reshardable_padding import masters_hold
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.reentrancy import ReentrancyGuard
from mcore_ckpt_ext.patching.singletons import PROCESS
from mcore_ckpt_ext.settings import ACCEPT_LOST, READ_ONCE, VERIFY_ALL

Function = Callable[..., Any]


def wrap_sharded_state_dict(original: Function) -> Function:
    """Around an optimizer's `sharded_state_dict`: mark what is asked for, and note what is to be saved."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def sharded_state_dict(self: Any, *positional: Any, **keywords: Any) -> Any:
        found = original(self, *positional, **keywords)
        call = signature.bind(self, *positional, **keywords)
        if not call.arguments.get("is_loading", False) or not isinstance(found, dict):
            PROCESS.one(PendingSave).note(self, found)
            return found
        asked = found if isinstance(found, LoadRequest) else LoadRequest(found)
        asked.optimizer = self  # the outermost of a chain is asked last
        return asked

    return sharded_state_dict


def wrap_load(original: Function) -> Function:
    """Around `dist_checkpointing.load`: an optimizer that Megatron cannot load is planned instead."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load(*positional: Any, **keywords: Any) -> Any:
        call = signature.bind(*positional, **keywords)
        tree, folder = call.arguments["sharded_state_dict"], Path(str(call.arguments["checkpoint_dir"]))
        requests = dict(requests_in(tree))
        part_of_ranks = call.arguments.get("process_group") is not None
        # Whoever has Megatron compare what the ranks ask for calls this on every rank.
        is_collective = bool(requests) or call.arguments.get("validate_access_integrity", True)
        if not is_collective or part_of_ranks or PROCESS.one(ReentrancyGuard).is_busy:
            return original(*positional, **keywords)
        if not _all_ask(folder, list(requests.values())):
            return original(*positional, **keywords)
        planned = [(path, _planned(folder, request)) for path, request in requests.items()]
        plans = {path: plan for path, plan in planned if plan is not None}
        if not plans:
            return original(*positional, **keywords)
        agreed("looking at the checkpoint", lambda: check_lists(tree, plans.keys()))
        call.arguments["sharded_state_dict"] = without(tree, plans.keys())
        return with_plans(original(*call.args, **call.kwargs), plans)

    return load


def wrap_load_state_dict(original: Function) -> Function:
    """Around an optimizer's `load_state_dict`: a plan is proven and carried out."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        if not isinstance(state_dict, LoadPlan):
            result = original(self, state_dict)
            PROCESS.one(UncheckedLoads).check(self)
            return result
        announce(str(state_dict.prepared.prove().fill()))
        return None

    return load_state_dict


def serves(optimizer: Any) -> bool:
    """Whether an optimizer is of a kind that this patch point fills: DistributedOptimizers, and nothing else."""
    chain = Chain.of(optimizer) if optimizer is not None else None
    return chain is not None and bool(chain.distributed) and not (chain.unknown or chain.whole)


def _all_ask(folder: Path, requests: Sequence[LoadRequest]) -> bool:
    """Whether every rank asks for an optimizer; else the load is Megatron's, if it can do it. Collective.

    Programs pass over a rank's optimizer that trains no parameter, a stub, whose `sharded_state_dict` cannot be called
    (`MegatronOptimizer.is_stub_optimizer`, core_v0.12.1 to 0.19.2): nor would they hand it what was loaded.

    Raises:
        ResumeRefusedError: on every rank, where some have no optimizer, and Megatron cannot load that of the others.
    """
    ask = gather(bool(requests))
    if all(ask) or not any(ask):
        return ask[0]
    speaks = rank_and_size()[0] == ask.index(True)

    def inspect_here() -> None:
        served = [request for request in requests if serves(request.optimizer)] if speaks else []
        if served and any(not _decided(folder, one.optimizer, _fits(folder, one)).is_stock for one in served):
            ranks = format_ranks(rank for rank, asks in enumerate(ask) if not asks)
            raise UnsupportedCheckpointError(
                "Megatron cannot load this optimizer, and some ranks have no optimizer",
                found=f"no optimizer on rank {ranks}, as where a rank trains no parameter", where=str(folder),
                hint="call mcore_ckpt_ext.load_optimizer(path, model, optimizer) on every rank, once the weights are "
                "loaded, in place of loading the optimizer's state",
            )  # fmt: skip

    agreed("looking at the checkpoint", inspect_here)
    return False


def _planned(folder: Path, request: LoadRequest) -> LoadPlan | None:
    """The plan for an optimizer that Megatron does not load from a checkpoint; None where it does. Collective.

    Raises:
        ResumeRefusedError: on every rank, when it cannot be filled either.
    """
    optimizer = request.optimizer
    fits = all(agreed("looking at the checkpoint", lambda: _fits(folder, request)))

    def inspect_here() -> tuple[LoadDecision, bool] | None:
        """The first rank's decision, and whether nothing shows beforehand that Megatron loads the right state."""
        if not is_first_rank() or not serves(optimizer):
            return None
        return _decided(folder, optimizer, fits), not open_checkpoint(folder).names(WEIGHT)

    found = agreed("looking at the checkpoint", inspect_here)[0]
    if found is None:
        return None
    decision, is_unchecked = found
    decision = with_order_compared(decision, folder, lambda: chunks_of(optimizer), optimizer)
    explain(decision, folder)
    if decision.is_stock:
        if is_unchecked:
            PROCESS.one(UncheckedLoads).add(optimizer, folder)
        return None
    chunks = chunks_of(optimizer)
    running = live_arguments(chunks, optimizer)
    plan = LoadPlan()
    plan.prepared = prepare(
        folder, chunks, optimizer, running,
        verify_all=VERIFY_ALL.value, accept_lost=ACCEPT_LOST.value, read_once=READ_ONCE.value,
    )  # fmt: skip
    return plan


def _fits(folder: Path, request: LoadRequest) -> bool:
    """Whether the folder has every array that this rank requests, of the same size; False where it cannot be read."""
    if not serves(request.optimizer):
        return True
    with suppress(CheckpointError):
        index = open_checkpoint(folder).format_reader.index
        return index is not None and is_stored_alike(request, index)
    return False


def _decided(folder: Path, optimizer: Any, fits: bool) -> LoadDecision:
    """The decision on an optimizer that this package serves.

    Args:
        folder: of the checkpoint.
        optimizer: the live optimizer.
        fits: every rank finds the arrays that it requests, of the same sizes. Where the stored layout is not known,
            this is all that can be seen beforehand; a load that Megatron then does is checked (`UncheckedLoads`).
    """
    checkpoint = open_checkpoint(folder)
    if checkpoint.optimizer_format is None:
        return LoadDecision(Loop.CORE)
    running, chain = live_arguments(chunks_of(optimizer), optimizer), Chain.of(optimizer)
    check_adapters(checkpoint, ParallelLayout.from_arguments(running), running)
    both = [_spelled_out(one) for one in (checkpoint.arguments, running)]
    # What the sidecar says of every buffer is compared afterwards (`with_order_compared`).
    by_arrays = checkpoint.sidecar is not None or not checkpoint.layout.unknown.isdisjoint(_PLACING)
    facts = LoadFacts(
        Loop.CORE,
        megatron_version(),
        optimizer_format=checkpoint.optimizer_format,
        is_moved=not fits if by_arrays else bool(placement_changes(*both)),
        chain=chain,
        written=checkpoint.arguments,
        running=running,
        switched=lambda: _switched(checkpoint, chain),
        stored_groups=stored_groups(folder),
        is_shifted=lambda: _is_shifted(checkpoint),
        is_before_first_step=lambda: is_before_first_step(checkpoint),
    )
    return decide(facts)


def _switched(checkpoint: Checkpoint, chain: Chain) -> list[str]:
    """The optimizer's arguments that differ, as far as the checkpoint states them."""
    kinds = {"optimizer_cpu_offload": is_offloaded, "use_precision_aware_optimizer": is_precision_aware}
    stated = {name: bool(value) for name, value in checkpoint.arguments.raw.items() if name in kinds}
    found = [name for name, value in stated.items() if value != any(map(kinds[name], chain.distributed))]
    joins = any(map(keeps_remainders, chain.distributed))
    index = checkpoint.format_reader.index
    if index is not None and has_remainders(index) != joins:
        found.append("store_param_remainders")
    return found


def _is_shifted(checkpoint: Checkpoint) -> bool:
    """Return whether masters are stored under the names of other weights.

    See `optimizers/workarounds/fully_reshardable_padding.py`. Without weights in the same folder it shows only later,
    and the load is checked afterwards.
    """
    names = [encoding.name for encoding in encodings_named(checkpoint.optimizer_format)]
    return FULLY_RESHARDABLE in names and bool(checkpoint.names(WEIGHT)) and not _is_as_named(checkpoint)


def _is_as_named(checkpoint: Checkpoint) -> bool:
    """Whether masters are those of the weights whose names they bear, as far as samples show; a shift is of many."""
    with suppress(CheckpointError):  # what is not known here, stock may know
        state, named = checkpoint.optimizer, checkpoint.names(FP32_PARAM)
        some = named[:: max(1, len(named) // _SAMPLES)]
        return not state.shifted and masters_hold(
            state, some, checkpoint.weights, checkpoint.transfer, checkpoint.proof.first_mismatch
        )
    return True


def _spelled_out(arguments: JobArguments) -> JobArguments:
    """With sizes that may be left out: expert tensor parallelism is tensor parallelism's, virtual stages are one."""
    layout = ParallelLayout.from_arguments(arguments)
    return arguments.replace(
        expert_tensor_parallel_size=layout.expert_tensor, virtual_pipeline_model_parallel_size=layout.virtual_pipeline
    )


_SAMPLES = 512
# Without these nobody knows which layout was saved.
_PLACING = ("tensor", "pipeline", "virtual_pipeline", "expert")
