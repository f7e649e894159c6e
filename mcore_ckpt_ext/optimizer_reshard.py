"""Fill a live Megatron optimizer of any layout from a checkpoint of any other layout.

The source is the checkpoint, the target this rank's shards. There are three phases; each ends when all ranks agree, and
returns the object that performs the next one. `prepare` plans and changes nothing. `Prepared.prove` reads the masters
into memory of its own and compares them with the live weights. `Proven.fill` writes. A refusal in the first two phases
leaves the optimizer unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mcore_ckpt_ext.collectives import agreed, agreed_here, gather, rank_and_size
from mcore_ckpt_ext.formats.common_state import scheduler_in
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.master_check import BY_ROUNDING, Proof, weaker_of
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.sidecar import FILE_NAME as SIDECAR_FILE
from mcore_ckpt_ext.megatron.live.compatibility import check_lost, name_map_for, verify_checksums
from mcore_ckpt_ext.megatron.live.job import LiveJob, RankSummary
from mcore_ckpt_ext.megatron.live.master_check import Prover
from mcore_ckpt_ext.megatron.live.model import Chunks, NameFunction, quantization_check
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import LiveShard
from mcore_ckpt_ext.megatron.live.planning import check_job, open_with_orders, plan_rank
from mcore_ckpt_ext.megatron.live.reading import Reading
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.optimizers.digests import check_digests
from mcore_ckpt_ext.optimizers.tied_copies import differing_masters, in_words


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

    def __str__(self) -> str:
        changed = f"; {self.changed} weights halfway between two values took the value that this optimizer writes"
        fresh = f"; {self.new:,} elements that the checkpoint's model does not have keep their initialization"
        return (
            f"optimizer resumed from {self.source} as {self.target}: {self.optimizer_format}, "
            f"{self.bytes_read / 1e6:,.1f} MB read, {self.parameters} parameters {self.certainty} "
            f"({self.elements:,} elements, placed by {' and '.join(self.order_sources)}), {self.seconds:.1f} s; "
            f"iteration {self.iteration} was loaded"
            f"{self.vocabulary}{fresh if self.new else ''}{changed if self.changed else ''}"
            f"{f'; {in_words(self.differing)}' if self.differing else ''}"
            f"{f'; {SIDECAR_FILE} is ignored: {self.sidecar_problem}' if self.sidecar_problem else ''}"
        )


def prepare(
    folder: Path,
    chunks: Chunks,
    optimizer: Any,
    arguments: JobArguments,
    *,
    verify_all: bool = False,
    accept_lost: bool = False,
    read_once: bool = False,
    own_bounds: bool = False,
) -> Prepared:
    """Open the checkpoint, recover the packing that this rank needs, plan, check each record. Collective.

    Args:
        folder: the iteration folder.
        chunks: the unwrapped model chunks.
        optimizer: the live optimizer.
        arguments: Megatron's arguments of the run.
        verify_all: compare the checksums of all records, shared between the ranks.
        accept_lost: take elements that the checkpoint lost from the weights (masters) or as zero (moments).
        read_once: one rank reads data that several ranks need and sends them to the others.
        own_bounds: see `carried_groups`.

    Raises:
        ResumeRefusedError: on every rank, if some rank cannot resume.
    """
    started = time.monotonic()
    jobs: list[LiveJob] = []

    def read() -> RankSummary:
        jobs.append(LiveJob(chunks, optimizer))
        return jobs[0].view

    views = agreed("reading the live model", read)

    def under_its_names() -> tuple[CheckpointView, LiveJob, NameFunction]:
        checkpoint, (job,) = open_with_orders(folder, views), jobs
        spell = name_map_for(checkpoint, {name for view in views for name in view.names}, arguments)
        if spell is str:
            return checkpoint, job, spell
        return open_with_orders(folder, views, spell), LiveJob(chunks, optimizer, spell), spell

    checkpoint, job, spell = agreed_here("opening the checkpoint", under_its_names)
    if not checkpoint.names(WEIGHT):
        live = {name: weight for weight_specs in gather(job.weight_specs()) for name, weight in weight_specs.items()}
        checkpoint = checkpoint.with_weights_of_a_job(live)

    def plan() -> Prepared:
        check_job(checkpoint, views, spell, arguments)
        if verify_all:
            verify_checksums(checkpoint, *rank_and_size())
        if not accept_lost:
            check_lost(checkpoint)
        for buffers in checkpoint.optimizer.buffers:
            check_digests(buffers, str(checkpoint.folder), rank_and_size())
        offloaded, share = bool(checkpoint.arguments.optimizer_cpu_offload), rank_and_size()
        groups = [adapter.param_groups for adapter in job.adapters]
        planned = plan_rank(checkpoint, job.shards, groups, arguments, accept_lost=accept_lost, own_bounds=own_bounds)
        return Prepared(
            job,
            checkpoint,
            planned.reading,
            groups=planned.groups,
            scaler=checkpoint.grad_scaler(),
            target=ParallelLayout.from_arguments(arguments),
            parameters=len({name for view in views for name in view.trained}),
            started=started,
            vocabulary=changed_padding(checkpoint.vocabulary_rows, arguments.padded_vocab_size),
            differing=differing_masters(checkpoint.optimizer, checkpoint.transfer, share) if offloaded else 0,
        )

    prepared = agreed_here("planning the resume", plan)
    if read_once:
        prepared.reading.share(agreed("planning what is read once", prepared.reading.wanted_bytes))
    return prepared


@dataclass(frozen=True)
class Prepared:
    """A planned resume; nothing has been changed yet."""

    job: LiveJob
    checkpoint: CheckpointView
    reading: Reading[LiveShard]
    groups: list[list[dict[str, Any]]]
    scaler: dict[str, Any] | None
    target: ParallelLayout
    parameters: int
    started: float
    differing: int = 0
    vocabulary: str = ""

    @property
    def bytes_read(self) -> int:
        """Number of tensor bytes that this rank reads."""
        return sum(plan.bytes_read for plan in self.reading.plans)

    @property
    def filled_elements(self) -> int:
        """Number of elements of this rank's memory that the checkpoint does not have."""
        return sum(fill.stop - fill.start for plan in self.reading.plans for fill in plan.fills)

    @property
    def lost_elements(self) -> int:
        """Number of elements that the checkpoint lost and the user accepted, summed over the kinds of state."""
        return sum(self.checkpoint.optimizer.lost_elements().values())

    @property
    def random_state_grid(self) -> tuple[int, ...] | None:
        """The grid of the ranks that stored their random state; None if the checkpoint has no random state."""
        return self.checkpoint.random_state_grid()

    @property
    def schedule(self) -> dict[str, Any] | None:
        """The stored state of the learning rate scheduler; None if the checkpoint has none."""
        found = scheduler_in(self.checkpoint.common)
        return found if isinstance(found, dict) else None

    @property
    def certainty(self) -> str:
        """Explain in words why the masters are known to belong to the weights."""
        checkpoint = self.checkpoint
        if checkpoint.weights_derived_from_masters:
            return "stored as masters, from which the weights are derived"
        if any(checkpoint.masters_are_derived(shard.name) for shard in self.job.shards):
            return "joined from their weights and remainders"
        proof = self.proof
        return f"verified {'equal to their weights' if proof is BY_ROUNDING else proof.words}"

    @property
    def proof(self) -> Proof:
        """The comparison of masters and weights that the checkpoint and live fp8 or fp4 weights permit."""
        live = (quantization_check(shard.live.parameter) for shard in self.job.shards)
        return reduce(weaker_of, live, self.checkpoint.proof)

    def prove(self) -> Proven:
        """Read this rank's masters and compare them with the live weights. Collective.

        The framework has already loaded the weights. The masters are read into the memory that holds the first moments
        afterwards: no byte is read twice, and no rank holds more than its own shards.

        Raises:
            ResumeRefusedError: on every rank, if some rank's masters do not round to its weights.
        """

        def work() -> Proven:
            with self.reading.taking_part([FP32_PARAM]):
                return read()

        def read() -> Proven:
            masters = {shard: shard.adapter.room(shard) for shard in self.job.shards}
            prover = Prover(masters, self.checkpoint)
            for shard, parts in self.reading.read(FP32_PARAM, masters, prover.on_read).items():
                for part in parts:
                    # Padding rows of the vocabulary and accepted lost elements take the values of the weights.
                    masters[shard][part] = shard.weight[part].float()
            prover.finish()
            return Proven(self, masters)

        return agreed_here("proving the masters against the weights", work)


@dataclass(frozen=True)
class Proven:
    """A resume whose masters are verified against the live weights; the optimizer is still unchanged."""

    prepared: Prepared
    masters: dict[LiveShard, torch.Tensor]

    def fill(self) -> Summary:
        """Write masters, moments, parameter groups and gradient scaler to the live optimizer; collective.

        Raises:
            ResumeRefusedError: on every rank, if reading failed on some rank; training must not continue.
        """
        prepared, reading = self.prepared, self.prepared.reading

        def work() -> tuple[int, _Done]:
            with reading.taking_part(reading.kinds):
                return write(), self._done()

        def write() -> int:
            changed = 0
            for shard, master in self.masters.items():
                self.masters[shard] = shard.adapter.set_master(shard, master)
                changed += self._follow(shard, master)
            for kind in reading.kinds:
                rooms = {s: self.masters.pop(s, None) for s in reading.shards(kind)}
                values = {shard: shard.adapter.room(shard) if room is None else room for shard, room in rooms.items()}
                reading.read(kind, values)
                for shard, tensor in values.items():
                    shard.adapter.keep(shard, kind, tensor)
            for shard in prepared.job.new:
                shard.adapter.set_master(shard, shard.weight.to(torch.float32, copy=True))
                for kind in shard.kinds:
                    shard.adapter.keep(shard, kind, shard.adapter.room(shard).zero_())
            for adapter, groups in zip(prepared.job.adapters, prepared.groups, strict=True):
                adapter.finish(groups, prepared.scaler)
            return changed

        results = agreed("writing the optimizer", work, "it is partly written: do not train on, start again")
        changed = sum(number for number, _ in results)
        if changed:
            for adapter in prepared.job.adapters:
                adapter.share_weights()
        prepared.checkpoint.reader.close()
        return self._summary(changed, [done for _, done in results])

    def _follow(self, shard: LiveShard, master: torch.Tensor) -> int:
        """Write the weights that this optimizer derives from new masters.

        Optimizers round differently if a master lies halfway between two weights.

        Returns:
            The number of weights that changed.
        """
        if shard.adapter.proof(shard) is not None and not self.prepared.checkpoint.masters_are_derived(shard.name):
            return 0
        if quantization_check(shard.live.parameter) is not None:
            return 0  # the next step writes them
        rounded = shard.adapter.rounded(shard, master)
        changed = int((rounded != shard.weight).sum())
        if changed:
            shard.weight.copy_(rounded)
        return changed

    def _done(self) -> _Done:
        prepared = self.prepared
        return _Done(
            elements=sum(shard.slice.numel for shard in prepared.job.shards),
            bytes_read=prepared.bytes_read,
            order_sources=prepared.checkpoint.optimizer.order_sources(),
            differing=prepared.differing,
            new=sum(shard.slice.numel for shard in prepared.job.new),
        )

    def _summary(self, changed: int, done: Sequence[_Done]) -> Summary:
        prepared, checkpoint = self.prepared, self.prepared.checkpoint
        return Summary(
            source=checkpoint.layout,
            target=prepared.target,
            iteration=checkpoint.iteration,
            optimizer_format=str(checkpoint.optimizer_format),
            order_sources=tuple(sorted({label for one in done for label in one.order_sources})),
            parameters=prepared.parameters,
            elements=sum(one.elements for one in done),
            bytes_read=sum(one.bytes_read for one in done),
            seconds=time.monotonic() - prepared.started,
            changed=changed,
            certainty=prepared.certainty,
            differing=sum(one.differing for one in done),
            sidecar_problem=checkpoint.sidecar_problem,
            new=sum(one.new for one in done),
            vocabulary=prepared.vocabulary,
        )


def changed_padding(stored: int | None, rows: int | None) -> str:
    """Return how the rows of the vocabulary change on a resume, for the log; empty if they do not."""
    changes = stored is not None and rows is not None and stored != rows
    return f"; the vocabulary is padded to {rows} rows, {stored} in the checkpoint" if changes else ""


class _Done(NamedTuple):
    """One rank's share of the numbers in a `Summary`."""

    elements: int
    bytes_read: int
    order_sources: list[str]
    differing: int
    new: int
