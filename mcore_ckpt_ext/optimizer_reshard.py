"""Fill a live Megatron optimizer of any layout from a checkpoint of any other layout.

The source is the checkpoint, the target this rank's shards. There are three phases; each ends when all ranks agree, and
returns the object that performs the next one. `prepare` plans and changes nothing. `Prepared.prove` reads the masters
into memory of its own and compares them with the live weights. `Proven.fill` writes. A refusal in the first two phases
leaves the optimizer unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch

from mcore_ckpt_ext.collectives import rank_and_size
from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.formats.accounts import Account, account_of_load
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.vocabulary import vocabulary_rows
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.master_check import BY_ROUNDING, MasterCheck, weaker_of
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.sidecar import FILE_NAME as SIDECAR_FILE
from mcore_ckpt_ext.layout.weight_spec import WeightSpec
from mcore_ckpt_ext.megatron.live.job import LiveJob, RankSummary
from mcore_ckpt_ext.megatron.live.job_ranks import perform
from mcore_ckpt_ext.megatron.live.master_check import Prover
from mcore_ckpt_ext.megatron.live.model import Chunks, quantization_check
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import LiveShard
from mcore_ckpt_ext.megatron.live.planning import FILLING, PREPARING, VERIFYING, plan_rank
from mcore_ckpt_ext.megatron.live.reading import Reading
from mcore_ckpt_ext.megatron.live.recorded_groups import packs_otherwise
from mcore_ckpt_ext.megatron.live.resume import Resume, ResumeOptions, changed_padding
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, PARAM_REMAINDER
from mcore_ckpt_ext.optimizers.tied_copies import differing_masters, differing_masters_note
from mcore_ckpt_ext.planning.read_dedup import Spans


@dataclass(frozen=True)
class Summary:
    """The result of a resume, over all ranks."""

    source: ParallelLayout
    target: ParallelLayout
    iteration: int
    optimizer_format: str
    order_sources: tuple[str, ...]
    parameters: int
    elements: int
    bytes_read: int
    seconds: float
    changed: int = 0
    certainty: str = "verified equal to their weights"
    sidecar_problem: str | None = None
    """Why the sidecar could not be read; None if it was read or is absent."""
    differing: int = 0
    """Number of masters of tied embeddings that differ between pipeline stages."""
    new: int = 0
    """Number of elements of parameters that the checkpoint's model does not have."""
    vocabulary: str = ""
    """How the padding of the vocabulary changed; empty if it did not."""
    account: Account = Account()
    """What was read of the checkpoint, and what was not looked at."""

    def __str__(self) -> str:
        changed = (
            f"; {quantity(self.changed, 'weight')} became what this optimizer writes for "
            f"{'its master' if self.changed == 1 else 'their masters'}"
        )
        fresh = f"; {quantity(self.new, 'element')} that the checkpoint's model does not have: newly initialized"
        placed = f"{quantity(self.elements, 'element')}, placed by {' and '.join(self.order_sources)}"
        return (
            f"optimizer resumed from {self.source} as {self.target}: {self.optimizer_format}, "
            f"{self.bytes_read / 1e6:,.1f} MB read, {quantity(self.parameters, 'parameter')} {self.certainty} "
            f"({placed}), {self.seconds:.1f} s; iteration {self.iteration} was loaded"
            f"{self.vocabulary}{fresh if self.new else ''}{changed if self.changed else ''}"
            f"{f'; {differing_masters_note(self.differing)}' if self.differing else ''}"
            f"{f'; {self.account.sentence}' if self.account.sentence else ''}"
            f"{f'; {SIDECAR_FILE} is ignored: {self.sidecar_problem}' if self.sidecar_problem else ''}"
        )


def prepare(
    session: LoadSession,
    chunks: Chunks,
    optimizer: Any,
    arguments: JobArguments,
    options: ResumeOptions,
) -> Prepared:
    """Open the checkpoint, recover the packing that this rank needs, plan, check each record. Collective.

    Args:
        session: the folder to load.
        chunks: the unwrapped model chunks.
        optimizer: the live optimizer.
        arguments: Megatron's arguments of the run.
        options: the user's options.

    Raises:
        ResumeRefusedError: on every rank, if some rank cannot resume.
    """
    resume = Resume(session, arguments, options)
    rank = LiveRank(chunks, optimizer)
    perform(PREPARING, resume, rank)
    return Prepared(resume, rank)


class LiveRank:
    """This rank's part of a resume: its model and optimizer, and what it reads for them.

    Attributes:
        job: the model and optimizer under the checkpoint's names.
        reading: the read plan; set by `plan`.
        differing: number of masters of tied embeddings that differ between pipeline stages.
        summary: what all ranks have done; set by `finish`.
    """

    job: LiveJob
    reading: Reading[LiveShard]
    summary: Summary

    def __init__(self, chunks: Chunks, optimizer: Any) -> None:
        """Args: the unwrapped model chunks, the live optimizer."""
        self._chunks = chunks
        self._optimizer = optimizer
        self._started = time.monotonic()
        self._groups: list[list[dict[str, Any]]] = []
        self._masters: dict[LiveShard, torch.Tensor] = {}
        self.differing = 0

    @property
    def bytes_read(self) -> int:
        """Number of tensor bytes that this rank reads."""
        return sum(plan.bytes_read for plan in self.reading.plans)

    def packs_otherwise(self, recorded: Mapping[tuple[int, int], str]) -> bool:
        """Return True if a sidecar gives parameters other places in this rank's buffers."""
        return packs_otherwise(recorded, self._chunks, self._optimizer)

    def read_model(self, resume: Resume) -> RankSummary:
        """Read the live model and optimizer, and return the summary for the other ranks."""
        self.job = LiveJob(self._chunks, self._optimizer, resume.spell)
        return self.job.summary

    def rename(self, resume: Resume) -> None:
        """Read the live model again if the checkpoint has other names."""
        if resume.spell is not str:
            self.read_model(resume)

    def weight_specs(self) -> dict[str, WeightSpec]:
        """Describe the live weights, for an optimizer that is stored without them."""
        return self.job.weight_specs()

    def plan(self, resume: Resume) -> None:
        """Plan the reads of this rank's optimizer."""
        checkpoint = resume.checkpoint
        groups = [adapter.param_groups for adapter in self.job.adapters]
        planned = plan_rank(resume, self.job.shards, groups)
        self.reading = planned.reading
        self._groups = planned.groups
        if checkpoint.job.arguments().optimizer_cpu_offload:
            self.differing = differing_masters(checkpoint.optimizer.state(), checkpoint.files.transfer, rank_and_size())

    def wanted_bytes(self) -> dict[str, Spans]:
        """Return the byte ranges of each kind that this rank needs."""
        return self.reading.wanted_bytes()

    def share(self, wanted: Sequence[Mapping[str, Spans]]) -> None:
        """Let one rank read what several ranks need; `wanted` has the byte ranges of every rank."""
        self.reading.share(wanted)

    def verify_masters(self, resume: Resume) -> None:
        """Read this rank's masters and compare them with the live weights, which are already loaded.

        The masters are read into the memory that holds the first moments afterwards: no byte is read twice, and no
        rank holds more than its own shards.

        Raises:
            CheckpointError: they cannot be read, or a master does not round to its weight.
        """
        with self.reading.taking_part([FP32_PARAM]):
            masters = {shard: shard.adapter.room(shard) for shard in self.job.shards}
            prover = Prover(masters, resume.checkpoint)
            for shard, parts in self.reading.read(FP32_PARAM, masters, prover.on_read).items():
                for part in parts:
                    # Padding rows of the vocabulary and accepted lost elements take the values of the weights.
                    masters[shard][part] = shard.weight[part].float()
            prover.finish()
            self._masters = masters

    def fill(self, resume: Resume) -> _Filled:
        """Write masters, moments, parameter groups and gradient scaler to the live optimizer."""
        with self.reading.taking_part(self.reading.kinds):
            changed = self._write(resume)
            return _Filled(
                changed=changed,
                elements=sum(shard.slice.numel for shard in self.job.shards),
                bytes_read=self.bytes_read,
                order_sources=resume.checkpoint.optimizer.state().order_sources(),
                differing=self.differing,
                new=sum(shard.slice.numel for shard in self.job.new),
            )

    def _write(self, resume: Resume) -> int:
        """Write this rank's part, and return the number of weights that changed."""
        changed = 0
        for shard, master in self._masters.items():
            self._masters[shard] = shard.adapter.set_master(shard, master)
            changed += _follow(resume.checkpoint, shard, master)
        for kind in self.reading.kinds:
            rooms = {shard: self._masters.pop(shard, None) for shard in self.reading.shards(kind)}
            values = {shard: shard.adapter.room(shard) if room is None else room for shard, room in rooms.items()}
            self.reading.read(kind, values)
            for shard, tensor in values.items():
                shard.adapter.keep(shard, kind, tensor)
        self._masters.clear()
        for shard in self.job.new:
            shard.adapter.set_master(shard, shard.weight.to(torch.float32, copy=True))
            for kind in shard.kinds:
                shard.adapter.keep(shard, kind, shard.adapter.room(shard).zero_())
        scaler = resume.checkpoint.optimizer.grad_scaler()
        for adapter, groups in zip(self.job.adapters, self._groups, strict=True):
            adapter.finish(groups, scaler)
        return changed

    def finish(self, resume: Resume, filled: Sequence[_Filled]) -> None:
        """Share weights that changed, and summarize what all ranks have done."""
        changed = sum(of_rank.changed for of_rank in filled)
        if changed:
            for adapter in self.job.adapters:
                adapter.share_weights()
        checkpoint = resume.checkpoint
        checkpoint.files.reader.close()
        self.summary = Summary(
            source=checkpoint.job.layout,
            target=ParallelLayout.from_arguments(resume.running),
            iteration=checkpoint.job.iteration(),
            optimizer_format=str(checkpoint.optimizer.format()),
            order_sources=tuple(sorted({label for of_rank in filled for label in of_rank.order_sources})),
            parameters=len({name for summary in resume.summaries for name in summary.trained}),
            elements=sum(of_rank.elements for of_rank in filled),
            bytes_read=sum(of_rank.bytes_read for of_rank in filled),
            seconds=time.monotonic() - self._started,
            changed=changed,
            certainty=self.certainty(checkpoint),
            differing=sum(of_rank.differing for of_rank in filled),
            sidecar_problem=checkpoint.job.found_sidecar().problem,
            new=sum(of_rank.new for of_rank in filled),
            vocabulary=changed_padding(vocabulary_rows(checkpoint), resume.running.padded_vocab_size),
            account=account_of_load(checkpoint),
        )

    def certainty(self, checkpoint: CheckpointView) -> str:
        """Explain in words why the masters are known to belong to the weights."""
        if checkpoint.optimizer.weights_derived_from_masters:
            return "stored as masters, from which the weights are derived"
        if any(checkpoint.optimizer.masters_are_derived(shard.name) for shard in self.job.shards):
            has_remainders = PARAM_REMAINDER in checkpoint.optimizer.state().kinds
            return "joined from their weights and remainders" if has_remainders else "with fp32 weights as masters"
        master_check = self.master_check(checkpoint)
        return f"verified {'equal to their weights' if master_check is BY_ROUNDING else master_check.relation}"

    def master_check(self, checkpoint: CheckpointView) -> MasterCheck:
        """Return the comparison of masters and weights that the checkpoint and live weights permit."""
        live = (quantization_check(shard.live.parameter) for shard in self.job.shards)
        return reduce(weaker_of, live, checkpoint.job.master_check)


def _follow(checkpoint: CheckpointView, shard: LiveShard, master: torch.Tensor) -> int:
    """Write the weights that this optimizer derives from new masters.

    Optimizers round differently if a master lies halfway between two weights, and fp16 masters are themselves rounded.

    Returns:
        The number of weights that changed.
    """
    if shard.adapter.master_check(shard) is not None and not checkpoint.optimizer.masters_are_derived(shard.name):
        return 0
    if quantization_check(shard.live.parameter) is not None:
        return 0  # the next step writes them
    rounded = shard.adapter.round_masters(shard, master)
    changed = int((rounded != shard.weight).sum())
    if changed:
        shard.weight.copy_(rounded)
    return changed


class _Filled(NamedTuple):
    """One rank's share of the numbers in a `Summary`."""

    changed: int
    elements: int
    bytes_read: int
    order_sources: list[str]
    differing: int
    new: int


@dataclass(frozen=True)
class Prepared:
    """A planned resume; nothing has been changed yet."""

    resume: Resume
    rank: LiveRank

    @property
    def checkpoint(self) -> CheckpointView:
        """The checkpoint that is resumed."""
        return self.resume.checkpoint

    @property
    def lost_elements(self) -> int:
        """Number of elements that the checkpoint lost and the user accepted, summed over the kinds of state."""
        return sum(self.checkpoint.optimizer.state().lost_elements().values())

    @property
    def schedule(self) -> dict[str, Any] | None:
        """The stored state of the learning rate scheduler; None if the checkpoint has none."""
        return self.resume.schedule

    def prove(self) -> Proven:
        """Read this rank's masters and compare them with the live weights. Collective.

        Raises:
            ResumeRefusedError: on every rank, if some rank's masters do not round to its weights.
        """
        perform([VERIFYING], self.resume, self.rank)
        return Proven(self)


@dataclass(frozen=True)
class Proven:
    """A resume whose masters are verified against the live weights; the optimizer is still unchanged."""

    prepared: Prepared

    def fill(self) -> Summary:
        """Write masters, moments, parameter groups and gradient scaler to the live optimizer; collective.

        Raises:
            ResumeRefusedError: on every rank, if reading failed on some rank; training must not continue.
        """
        perform([FILLING], self.prepared.resume, self.prepared.rank)
        return self.prepared.rank.summary
