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
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.collectives import agree, gather
from mcore_ckpt_ext.continuity.order_change import CHANGES
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.megatron.core_phases import DECIDING, CoreRank, CoreResume
from mcore_ckpt_ext.megatron.core_save import PendingSave
from mcore_ckpt_ext.megatron.live.job_ranks import perform
from mcore_ckpt_ext.megatron.live.planning import PREPARING
from mcore_ckpt_ext.megatron.live.resume import ResumeOptions
from mcore_ckpt_ext.megatron.load_assessment import explain
from mcore_ckpt_ext.megatron.load_facts import UNSTATED
from mcore_ckpt_ext.megatron.load_request import (
    LoadPlan,
    LoadRequest,
    check_lists,
    requests_in,
    with_plans,
    without,
)
from mcore_ckpt_ext.megatron.load_session import LoadSession, session_at
from mcore_ckpt_ext.megatron.presentation import lacks_common_file
from mcore_ckpt_ext.megatron.random_states import lacks_requested_states, with_live_random_states
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.megatron.stored_layers import request_stored_layers
from mcore_ckpt_ext.megatron.unchecked_loads import UncheckedLoads
from mcore_ckpt_ext.optimizer_reshard import Prepared
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.patch_point import Function
from mcore_ckpt_ext.patching.reentrancy import ReentrancyGuard
from mcore_ckpt_ext.patching.singletons import PROCESS
from mcore_ckpt_ext.settings import ACCEPT_LOST, READ_ONCE, VERIFY_ALL


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
        count = max(gather(len(requests)))
        asked = [*requests.items(), *[(None, None)] * (count - len(requests))]
        planned = [(path, _plan(session, request)) for path, request in asked]
        plans = {path: plan for path, plan in planned if path is not None and plan is not None}
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


def _plan(session: LoadSession, request: LoadRequest | None) -> LoadPlan | None:
    """Plan the resume of an optimizer that Megatron cannot load. Collective.

    Args:
        session: the folder to load.
        request: what this rank requests; None if only other ranks request an optimizer.

    Returns:
        The plan, or None if Megatron loads the optimizer.

    Raises:
        ResumeRefusedError: on every rank, if this package cannot fill the optimizer either, or if the user requires
            the order of the data.
    """
    options = ResumeOptions(VERIFY_ALL.value, ACCEPT_LOST.value, READ_ONCE.value)
    resume = CoreResume(session, UNSTATED, options)
    rank = CoreRank(request)
    perform(DECIDING, resume, rank)
    if resume.assessment is None or resume.data is None:
        return None
    explain(resume.assessment.decision, session.folder)
    if resume.assessment.decision.is_stock:
        if resume.data.verdict == CHANGES:
            announce(resume.data.sentence)
        if resume.lacks_weights and request is not None and not resume.absent:
            PROCESS.one(UncheckedLoads).add(request.optimizer, session.folder)
        return None
    perform(PREPARING, resume, rank)
    plan = LoadPlan()
    plan.order = resume.data
    plan.prepared = Prepared(resume, rank)
    return plan
