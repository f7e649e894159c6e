"""Rehearses a resume: the steps of a live job in their order, with simulated ranks, up to the first write."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError, interpreting, some
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.target import version_number
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.layout.master_check import BY_ROUNDING
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.weight_shards import check_gates
from mcore_ckpt_ext.megatron.live.compatibility import check_lost, check_optimizer_was_saved, check_tokens
from mcore_ckpt_ext.megatron.live.param_groups import takes_own_bounds
from mcore_ckpt_ext.megatron.live.planning import check_job, open_with_orders
from mcore_ckpt_ext.megatron.new_tokens import new_tokens, refusal
from mcore_ckpt_ext.megatron.probe import check_whole, look_around
from mcore_ckpt_ext.rehearsal.agreement import RefusedError, on_every_rank
from mcore_ckpt_ext.rehearsal.data_parallel import DataParallelRanks
from mcore_ckpt_ext.rehearsal.groups import simulated_groups
from mcore_ckpt_ext.rehearsal.ranks import SimulatedJob
from mcore_ckpt_ext.rehearsal.result import SCHEMA, Rehearsal
from mcore_ckpt_ext.rehearsal.shares import PLANNING, Shares
from mcore_ckpt_ext.rehearsal.target import TargetJob, check_changes, target_job
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_folder, iteration_number
from mcore_ckpt_ext.storage.paths import as_path
from mcore_ckpt_ext.versions import Version

_LOOKING = "looking at the checkpoint"


def rehearse(
    path: str | os.PathLike[str],
    gpus: int,
    sizes: Mapping[str, int],
    *,
    megatron_version: str | None = None,
    full: bool = False,
    stated: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Rehearsal:
    """Do what a resume under another layout would do up to its first write, for all ranks, without Megatron.

    Args:
        path: a run folder (its newest iteration) or an iteration folder.
        gpus: number of GPUs.
        sizes: the size of each dimension, by its name in `ParallelLayout`; see `target.sizes_in`.
        megatron_version: the release that will run; by default the installed one, else the newest known.
        full: compare all masters with their weights, not only samples.
        stated: arguments of the job that wrote, which the checkpoint does not state.
        changes: arguments in which the job that resumes differs, beside its layout.

    Raises:
        UsageError: a value makes no sense.
        CheckpointError: the checkpoint cannot be read, or a rehearsal cannot simulate such a job.
    """
    if gpus < 1:
        raise UsageError("the number of GPUs is not 1 or more", found=f"{gpus}")
    check_changes(changes or {})
    version = version_number(megatron_version)
    with interpreting(path):
        folder = iteration_folder(as_path(path))
        plain = Rehearsal(SCHEMA, str(folder), gpus, "not known", _in_words(sizes), str(version))
        try:
            _look_around(folder)
            checkpoint = on_every_rank(_LOOKING, gpus, lambda: _opened(folder))
            written = checkpoint.arguments.changed(**stated) if stated else checkpoint.arguments
            plain = replace(plain, old_layout=str(ParallelLayout.from_arguments(written)))
            job = on_every_rank(
                PLANNING, gpus, lambda: target_job(checkpoint, written, gpus, sizes, version, changes or {}),
                beyond_rehearsal=(UnsupportedCheckpointError, UsageError),
            )  # fmt: skip
        except RefusedError as refused:
            return _refused(plain, refused)
        plain = replace(
            plain, new_layout=str(job.layout), iteration=checkpoint.iteration,
            optimizer_format=checkpoint.optimizer_format, flags=job.flags,
        )  # fmt: skip
        if job.refused is not None:
            return replace(plain, refusal=f"Megatron does not accept this layout: {job.refused}")
        return _Rehearsing(folder, written, job, version, plain).result(full=full)


class _Rehearsing:
    """The steps from the first look at a checkpoint on, as `megatron/load.py` and `optimizer_reshard` take them."""

    def __init__(self, folder: Path, written: JobArguments, job: TargetJob, version: Version, plain: Rehearsal) -> None:
        self._folder, self._written, self._job, self._version, self._plain = folder, written, job, version, plain

    def result(self, *, full: bool) -> Rehearsal:
        try:
            return self._done(full=full)
        except RefusedError as refused:
            return _refused(self._plain, refused)

    def _done(self, *, full: bool) -> Rehearsal:
        ranks, running = self._job.layout.world, self._job.arguments
        on_every_rank(_LOOKING, ranks, self._look)
        checkpoint = on_every_rank("opening the checkpoint", ranks, lambda: open_with_orders(self._folder, ()))
        if checkpoint.optimizer_format is None:
            raise UnsupportedCheckpointError(
                "the checkpoint holds no optimizer state that is read, so there is nothing to rehearse",
                where=str(self._folder),
                helps="weights alone are loaded by Megatron under any layout",
            )
        simulated = SimulatedJob(checkpoint, running, self._version)
        on_every_rank(PLANNING, ranks, lambda: self._check(checkpoint, simulated))
        stored = on_every_rank(PLANNING, ranks, checkpoint.param_groups)
        groups = simulated_groups(stored, self._written, running, experts_apart=simulated.models.experts_apart)
        own_bounds = takes_own_bounds(running.stated, self._version)
        shares = Shares(
            simulated, checkpoint, groups, DataParallelRanks(simulated, checkpoint, self._version),
            own_bounds=own_bounds,
        )  # fmt: skip
        shares.plan()
        tokens = new_tokens(checkpoint.vocabulary_rows, Namespace(**running.stated))
        if tokens:
            raise RefusedError(refusal(tokens, str(self._folder.parent)))
        shares.find_weights()
        shares.prove(full=full)
        figures = shares.figures
        return replace(
            self._plain, will_succeed=True, parameters=len(figures.names), parts=figures.parts,
            elements=figures.elements, weights=figures.weights, bytes_read=figures.bytes_read,
            proven=figures.proven, proof=_proof(checkpoint), is_full_proof=full,
            witnesses=tuple(checkpoint.optimizer.witnesses()), given=tuple(self._given(checkpoint, simulated)),
        )  # fmt: skip

    def _look(self) -> None:
        """What the first look at a checkpoint refuses (`load_decision`)."""
        check_optimizer_was_saved(self._written, str(self._folder))
        check_tokens(self._written.tokens, self._job.arguments, self._folder)
        check_gates(self._written, self._job.arguments, str(self._folder))

    def _check(self, checkpoint: CheckpointView, simulated: SimulatedJob) -> None:
        check_job(checkpoint, [simulated.view], str, self._job.arguments)
        check_lost(checkpoint)

    def _given(self, checkpoint: CheckpointView, simulated: SimulatedJob) -> Iterator[str]:
        yield "the job builds the model, and its optimizer, by the same arguments as the job that wrote the checkpoint"
        tokens = self._job.arguments.tokens or checkpoint.tokens
        if tokens is None and checkpoint.vocabulary_rows is not None:
            yield "its tokenizer has no tokens beyond the rows of the checkpoint: how many there are is not stored"
        if simulated.frozen:
            yield f"parameters without optimizer state are frozen in the job, too: {some(simulated.frozen, 3)}"


def _opened(folder: Path) -> CheckpointView:
    checkpoint = open_checkpoint(folder)
    _ = checkpoint.common, checkpoint.arguments, checkpoint.layout, checkpoint.iteration
    return checkpoint


def _look_around(folder: Path) -> None:
    """Whether the iteration is complete, as the first rank of a job sees it.

    Raises:
        RefusedError: it is not, and another one is.
    """
    step = iteration_number(folder)
    if step is None:
        return
    arguments = Namespace(load=str(folder.parent), ckpt_step=step)
    sight = on_every_rank(
        "looking at what is to be loaded", 1,
        lambda: look_around(arguments, "load", str(folder.parent), shares_index=False),
    )  # fmt: skip
    on_every_rank(_LOOKING, 1, lambda: check_whole(sight.standing, str(folder.parent)))


def _proof(checkpoint: CheckpointView) -> str:
    proof = checkpoint.proof
    return "equal to their weights when rounded" if proof is BY_ROUNDING else proof.words


def _refused(plain: Rehearsal, refused: RefusedError) -> Rehearsal:
    return replace(plain, refusal=str(refused.error), is_verbatim=refused.is_verbatim)


def _in_words(sizes: Mapping[str, int]) -> str:
    labels = {"tensor": "TP", "pipeline": "PP", "virtual_pipeline": "VPP", "expert": "EP", "context": "CP"}
    return " x ".join(f"{label}{sizes[name]}" for name, label in labels.items() if sizes.get(name, 1) > 1) or "TP1"
