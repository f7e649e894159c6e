"""Gives a job the layout for the ranks that it has, before Megatron validates its arguments."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from mcore_ckpt_ext.continuity.batch_sizes import SCHEDULES, counts_by_layout, global_batch_of
from mcore_ckpt_ext.devices import smallest_memory
from mcore_ckpt_ext.errors import CheckpointError, ResumeRefusedError, UsageError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.job.dimensions import SPLIT_ARGUMENTS, VIRTUAL_STAGE_ARGUMENTS
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout_choice.elastic import own_layout
from mcore_ckpt_ext.megatron.elastic.agreement import Agreement
from mcore_ckpt_ext.megatron.elastic.ending import Ending
from mcore_ckpt_ext.megatron.elastic.hazards import hazards
from mcore_ckpt_ext.megatron.probe import check_complete
from mcore_ckpt_ext.megatron.run_folder import folder_to_load, takes_non_persistent
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.megatron.saving.parent_watch import end_with_starter
from mcore_ckpt_ext.megatron.saving.publisher import Grace
from mcore_ckpt_ext.operations.elastic_layout import ChosenLayout, choose_for, with_virtual_stages
from mcore_ckpt_ext.operations.iteration_health import iteration_health_of
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.singletons import PROCESS
from mcore_ckpt_ext.settings import AUTO_BATCH, FALLBACK, LAYOUT, OF_FLAGS
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_name
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from mcore_ckpt_ext.storage.gc_pause import collector_paused

# What the flags of a job decide even where they are not given: otherwise it would be the checkpoint's.
_DECIDED_BY_FLAGS = (
    *SPLIT_ARGUMENTS,
    *VIRTUAL_STAGE_ARGUMENTS,
    "virtual_pipeline_model_parallel_size",
    "expert_tensor_parallel_size",
    "eval_global_batch_size",
    "eval_micro_batch_size",
    "train_iters",
    "train_samples",
    *SCHEDULES,
)
# `LocalElasticAgent._shutdown` (torch/distributed/elastic/agent/server/local_elastic_agent.py, torch 2.13): a restart
# takes the default, whatever `--shutdown-timeout` says.
_SECONDS_BEFORE_SIGKILL = 30.0
# Seconds for the ranks that wait to notice that the job has ended.
_SECONDS_TO_END = 10.0


def apply_layout(arguments: Any) -> None:
    """Set the layout for the ranks of this start, if `--ckpt-ext-layout` says so; or wait to its end.

    Nothing changes if the number of ranks fits the job's flags.

    Args:
        arguments: Megatron's arguments before `validate_args`.

    Raises:
        CheckpointError: no layout keeps the training, or no checkpoint is complete; on every rank.
        SystemExit: this rank has waited, and the job has ended.
    """
    mode = LAYOUT.choose(arguments)
    if mode == OF_FLAGS or "WORLD_SIZE" not in os.environ:
        return
    _watch_end(arguments)
    ranks = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    if _fits(arguments, ranks):
        return
    patience = 60.0 * (getattr(arguments, "distributed_timeout_minutes", None) or 10)
    agreement = Agreement(_store(rank, patience), rank, ranks, patience)

    def decide() -> str:
        try:
            with collector_paused():
                chosen = _choose(arguments, ranks, may_change_batch=mode == AUTO_BATCH)
        except CheckpointError as error:
            refusals.append(error)
            return json.dumps({"refusal": str(error)})
        return json.dumps(
            {"arguments": dict(chosen.arguments), "gpus": chosen.gpus, "reason": chosen.reason, "notes": chosen.notes}
        )

    refusals: list[CheckpointError] = []
    decision = json.loads(agreement.share(decide))
    if refusals:
        raise refusals[0]
    if "refusal" in decision:
        raise ResumeRefusedError(decision["refusal"])
    announce(f"--ckpt-ext-layout {mode}: {decision['reason']}")
    _apply_decision(decision, arguments, rank, ranks, agreement)


def _watch_end(arguments: Any) -> None:
    """Observe the end of this process, end it with its agent, and say what the job cannot survive."""
    PROCESS.one(Ending).watch()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_starter()
        if getattr(arguments, "exit_signal_handler", False):
            PROCESS.one(Grace).seconds = _SECONDS_BEFORE_SIGKILL
    for hazard in hazards(os.environ, _command_line(os.getppid()), arguments):
        announce(f"--ckpt-ext-layout: {hazard}")


def _command_line(process: int) -> list[str]:
    """Return the words that a process was started with; empty if they cannot be read."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text().rstrip("\0").split("\0")
    except OSError:
        return []


def _fits(arguments: Any, ranks: int) -> bool:
    """Return whether the job's own flags fit the ranks, whatever was saved; the same on all of them.

    Raises:
        UsageError: the flags do not give the global batch.
    """
    job = JobArguments.of(with_virtual_stages(vars(arguments)))
    if global_batch_of(job) is None:
        raise UsageError(
            f"{LAYOUT.flag} keeps the global batch, and the job does not state it",
            expected="--global-batch-size",
            hint="give it: without it, Megatron derives the batch from the number of GPUs",
        )
    return not counts_by_layout(job) and own_layout(job, ranks, megatron_version())[1] is None


def _choose(arguments: Any, ranks: int, *, may_change_batch: bool) -> ChosenLayout:
    """Choose, from the newest complete checkpoint if there is one, otherwise from the flags alone."""
    flags = {name: value for name, value in vars(arguments).items() if value is not None}
    flags |= {name: getattr(arguments, name, None) for name in _DECIDED_BY_FLAGS}
    for name in ("rank", "local_rank", "world_size"):
        flags.pop(name, None)
    node = int(os.environ.get("LOCAL_WORLD_SIZE", "8"))
    index = _newest(arguments)
    checkpoint = None if index is None else open_checkpoint(index.folder, index=index)
    return choose_for(
        checkpoint,
        ranks,
        arguments=flags,
        gpus_per_node=node,
        gpu_memory=smallest_memory(),
        version=megatron_version(),
        may_change_batch=may_change_batch,
    )


def _newest(arguments: Any) -> FolderIndex | None:
    """Return the index of the iteration that the job will resume; None if it starts from the beginning.

    Raises:
        ResumeRefusedError: it is not complete, and no other one may be taken.
    """
    folder = folder_to_load(getattr(arguments, "load", None), arguments)
    if folder is None or "://" in str(arguments.load):
        return None
    run = Path(str(arguments.load))
    index = FolderIndex(folder)
    if takes_non_persistent(str(run), arguments):
        return index
    health = iteration_health_of(run, getattr(arguments, "ckpt_step", None) or None, index)
    if health is None or not health.problems:
        return index
    if health.newest_complete is None:
        raise ResumeRefusedError(
            "no checkpoint of this run is complete",
            found=f"{health.wanted}: {health.problems[0]}",
            where=str(run),
            hint="to list what is missing: mcore-ckpt verify PATH",
        )
    if not FALLBACK.choose(arguments):
        check_complete(health, str(run))
    return FolderIndex(run / iteration_name(health.newest_complete))


def _apply_decision(decision: Mapping[str, Any], arguments: Any, rank: int, ranks: int, agreement: Agreement) -> None:
    """Set the layout, or wait for the end of the job if this rank has no part in it."""
    gpus = int(decision["gpus"])
    waiting = ranks - gpus
    ending = PROCESS.one(Ending)
    if rank >= gpus:
        code = agreement.wait_for_end()
        sys.exit(1 if code is None else code)
    if waiting and rank == 0:
        ending.call_at_end(lambda code: agreement.announce_end(code, waiting, _SECONDS_TO_END))
    for name, value in decision["arguments"].items():
        if hasattr(arguments, name):
            setattr(arguments, name, value)
    _set_stages_of_old_releases(arguments, decision["arguments"])
    if getattr(arguments, "inprocess_active_world_size", None) == ranks:
        arguments.inprocess_active_world_size = gpus
    local = int(os.environ.get("LOCAL_RANK", "0"))
    os.environ["WORLD_SIZE"] = str(gpus)
    os.environ["LOCAL_WORLD_SIZE"] = str(min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), gpus - rank + local))


def _set_stages_of_old_releases(arguments: Any, values: Mapping[str, Any]) -> None:
    """Set the layers of a virtual stage, where a release has no argument for the number of stages.

    `--num-virtual-stages-per-pipeline-rank` came in core_v0.12.0 (megatron/training/arguments.py).
    """
    stages = values["num_virtual_stages_per_pipeline_rank"]
    if stages and not hasattr(arguments, "num_virtual_stages_per_pipeline_rank"):
        per_rank = arguments.num_layers // arguments.pipeline_model_parallel_size
        arguments.num_layers_per_virtual_pipeline_stage = per_rank // stages


def _store(rank: int, patience: float) -> Any:
    """Return the store that torch itself connects to when it initializes its process groups.

    Without the agents' store, the first rank hosts it; torch finds the same server in this process later
    (`multi_tenant`; `_create_c10d_store`, torch/distributed/rendezvous.py, torch 2.13).
    """
    is_of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not is_of_agent,
        timeout=timedelta(seconds=patience),
        wait_for_workers=False,
        multi_tenant=True,
    )
    return PROCESS.one(_KeptStore, lambda: _KeptStore(store)).store


class _KeptStore:
    """Keeps the server of a store alive until this process ends."""

    def __init__(self, store: Any) -> None:
        self.store = store
