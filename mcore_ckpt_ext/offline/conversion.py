"""Converting a checkpoint into another format or layout: from a path to a published folder.

The target lays out its files, the source says where each element lies, the plan between the two is executed block by
block, and every master is proven against its weight on the way.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mcore_ckpt_ext.errors import DestinationError, ProofError, UnreadableCheckpointError, interpreting
from mcore_ckpt_ext.families.recognition import family_named
from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.formats.checkpoint import TRACKER_FILE, open_checkpoint
from mcore_ckpt_ext.formats.huggingface import TRANSFORMER_ENGINE
from mcore_ckpt_ext.formats.huggingface_folder import companions
from mcore_ckpt_ext.formats.huggingface_target import SHARD_BYTES, HuggingFaceOptions
from mcore_ckpt_ext.layout.proof import first_mismatch
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT, LogicalTensor
from mcore_ckpt_ext.offline.execution import LocalOutput, RemoteOutput
from mcore_ckpt_ext.offline.reading import Remembering
from mcore_ckpt_ext.offline.targets import Target, TargetOptions, installed_version, lay_out_target
from mcore_ckpt_ext.offline.team import Alone, Team
from mcore_ckpt_ext.planning.output import Block, Output, OutputFile, Placed, Record
from mcore_ckpt_ext.planning.plan import Plan, WantedSlice, make_plan
from mcore_ckpt_ext.storage.paths import as_path, is_remote
from mcore_ckpt_ext.transfer import Transfer
from mcore_ckpt_ext.writing import BLOCK_BYTES

DEFAULT_WORKERS = 4
DEFAULT_MEMORY = 1 << 30
# A block is held once as it is written, once more while it is proven, and its weights beside it.
_BLOCKS_AT_ONCE = 4


@dataclass(frozen=True)
class Report:
    """What a conversion did, or with `dry_run` what it would do; sizes in bytes."""

    destination: Path
    files: int
    records: int
    bytes_read: int
    bytes_written: int
    peak_memory: int
    proven_elements: int
    seconds: float
    notes: Sequence[str]
    lost: Mapping[str, int] = field(default_factory=dict)


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: str,
    megatron_version: str | None = None,
    tensor_model_parallel_size: int | None = None,
    pipeline_model_parallel_size: int | None = None,
    virtual_pipeline_model_parallel_size: int | None = None,
    expert_model_parallel_size: int | None = None,
    vocab_size: int | None = None,
    transformer_impl: str = TRANSFORMER_ENGINE,
    family: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    kind: str = WEIGHT,
    max_shard_size: int = SHARD_BYTES,
    pickled: bool = False,
    workers: int = DEFAULT_WORKERS,
    memory_limit: int = DEFAULT_MEMORY,
    force: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    accept_lost: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    team: Team | None = None,
) -> Report:
    """Convert a checkpoint, optimizer included.

    Args:
        source: a run folder (its newest iteration), an iteration folder, a Hugging Face or a canonical folder.
        destination: the run folder to make (for `hf` and `canonical` the folder itself).
        to: `torch_dist`, `legacy`, `hf` or `canonical`.
        megatron_version: the version that will read it; by default the installed one, else the newest known.
        tensor_model_parallel_size: of the job that will read it (`legacy`); by default that of the source.
        pipeline_model_parallel_size: likewise.
        virtual_pipeline_model_parallel_size: model chunks a pipeline rank, likewise.
        expert_model_parallel_size: likewise; for `torch_dist` it only says whether experts have an optimizer of
            their own.
        vocab_size: the tokenizer's size, to pad the vocabulary as Megatron pads it, or to remove its padding (`hf`).
        transformer_impl: layer spec of the job that will read what comes from a Hugging Face folder: its names differ.
        family: of the model, where it is not recognised: a name, or `path.py:Class`, which is executed.
        tokenizer: for `hf`, the folder of a tokenizer or model whose small files are copied.
        dtype: for `hf`, of all floating-point tensors; by default as stored.
        kind: for `hf`, what to export: `weight`, or `fp32_param` for the masters.
        max_shard_size: for `hf`, the most bytes that a file of weights holds.
        pickled: for `hf`, write `pytorch_model.bin` instead of safetensors.
        workers: records that are written at the same time.
        memory_limit: bytes that blocks of all workers may take together.
        force: replace the destination.
        resume: continue an interrupted conversion of the same source with the same options.
        dry_run: only say what would be done.
        accept_lost: convert although the source lacks elements of the optimizer; their masters are taken from the
            weights, their moments become zero.
        progress: told the bytes written so far and the bytes to write, of this process.
        team: the processes that share the work, each with the same arguments; by default this one alone.

    Raises:
        CheckpointError: the source cannot be read, proven or represented, or the destination not written. Nothing is
            published then.
    """
    begun = time.monotonic()
    team = team or Alone()
    of_family = family_named(family) if family else None
    checkpoint = open_checkpoint(source, family=of_family, transformer_impl=transformer_impl)
    before = _state_of(checkpoint.folder)
    options = TargetOptions(
        megatron_version=megatron_version or installed_version(),
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        vocab_size=vocab_size,
        hugging_face=HuggingFaceOptions(
            family=of_family,
            vocab_size=vocab_size,
            dtype=dtype,
            kind=kind,
            shard_bytes=max_shard_size,
            pickled=pickled,
            tokenizer=_tokenizer(tokenizer),
        ),
    )
    with interpreting(checkpoint.folder):
        target = lay_out_target(checkpoint, to, options)
    output = _below(target.output, target.folder)
    destination = as_path(destination)
    destination = destination if is_remote(destination) else destination.absolute()
    _check_destination(destination, checkpoint.folder, target.folder)
    with interpreting(checkpoint.folder):
        lost = _checked_losses(checkpoint, accept_lost) if target.reads_optimizer else {}
    block_bytes = max(1 << 16, min(BLOCK_BYTES, memory_limit // (workers * _BLOCKS_AT_ONCE)))
    filler = _Filler(checkpoint, accept_lost)
    if not dry_run:
        identity = repr((str(checkpoint.folder), before, to, options, transformer_impl, accept_lost))
        fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        make = RemoteOutput if is_remote(destination) else LocalOutput
        written = make(destination, fingerprint, team, workers, block_bytes)

        def check() -> None:
            _check_unchanged(checkpoint.folder, before)
            _check_readable(written.folder, checkpoint, target)

        written.write(output, filler.fill, check, progress, force=force, resume=resume)
    return Report(
        destination=destination,
        files=len(output.files),
        records=len(output.records),
        bytes_read=sum(record.nbytes for record in output.records),
        bytes_written=output.bytes_written,
        peak_memory=workers * _BLOCKS_AT_ONCE * block_bytes,
        proven_elements=team.total(filler.proven),
        seconds=time.monotonic() - begun,
        notes=target.notes,
        lost=lost,
    )


def _checked_losses(checkpoint: Checkpoint, accept_lost: bool) -> dict[str, int]:
    """Elements that the source lacks, by parameter.

    Raises:
        ProofError: there are some, and they were not accepted.
    """
    lost = dict(checkpoint.optimizer.lost_elements()) if checkpoint.optimizer_format else {}
    if lost and not accept_lost:
        raise ProofError(
            "the checkpoint was written damaged: elements of the optimizer are not in it",
            found=", ".join(f"{count} of {name}" for name, count in list(lost.items())[:8]),
            where=str(checkpoint.folder),
            helps="use another iteration, or accept the loss: --accept-lost",
        )
    return lost


class _Filler:
    """Reads the content of blocks, and proves the masters in them."""

    def __init__(self, checkpoint: Checkpoint, accept_lost: bool) -> None:
        self.proven = 0
        self._source = Remembering(checkpoint)
        # The records are shared between threads already.
        self._transfer = Transfer(checkpoint.reader, workers=1)
        self._accept_lost = accept_lost
        self._lock = threading.Lock()

    def fill(self, record: Record, block: Block, elements: torch.Tensor) -> None:
        """See `writing.FillBlock`.

        Raises:
            ProofError: a master does not round to its weight.
            CheckpointError: the source is damaged or incomplete.
        """
        rooms = [(placed, elements[placed.start : placed.stop]) for placed in block.content]
        self._read([(placed.wanted, room) for placed, room in rooms if not placed.turned_rows])
        for placed, room in rooms:
            if placed.turned_rows:
                self._read_turned(placed, room)

    def _read(self, parts: Sequence[tuple[WantedSlice, torch.Tensor]]) -> None:
        """Read slices, and prove the masters among them before any rounding."""
        exact = [
            torch.empty(room.numel()) if wanted.kind == FP32_PARAM and room.dtype != torch.float32 else room
            for wanted, room in parts
        ]
        plan = make_plan([wanted for wanted, _ in parts], self._source, self._accept_lost)
        self._transfer.execute(plan, exact)
        for index, ((wanted, room), values) in enumerate(zip(parts, exact, strict=True)):
            if wanted.kind == FP32_PARAM:
                self._prove(wanted, values, plan, index)
            if values is not room:
                room.copy_(values)

    def _read_turned(self, placed: Placed, room: torch.Tensor) -> None:
        """Read the columns that hold a part of a transpose."""
        height, part = placed.turned_rows, placed.wanted.slice
        left, right = part.start // height, -(-part.stop // height)
        regions = tuple(
            Region(region.name, (region.offsets[0], left), (region.sizes[0], right - left)) for region in part.regions
        )
        columns = torch.empty(height * (right - left), dtype=room.dtype)
        self._read([(replace(placed.wanted, slice=Slice.whole(regions)), columns)])
        turned = columns.view(height, right - left).t().reshape(-1)
        room.copy_(turned[part.start - left * height : part.stop - left * height])

    def _prove(self, wanted: WantedSlice, masters: torch.Tensor, plan: Plan, index: int) -> None:
        tensors = {name: self._weight(name, tensor) for name, tensor in wanted.tensors.items()}
        dtype = next(iter(tensors.values())).dtype
        weights = torch.empty(masters.numel(), dtype=getattr(torch, dtype))
        beside = make_plan([replace(wanted, kind=WEIGHT, tensors=tensors)], self._source)
        self._transfer.execute(beside, [weights])
        for fill in plan.fills:
            if fill.target == index:
                # Nobody has these masters: padding of the vocabulary (zero on both sides), or accepted losses.
                masters[fill.start : fill.stop] = weights[fill.start : fill.stop]
        mismatch = first_mismatch(masters, weights)
        if mismatch is not None:
            raise ProofError(
                "a master does not round to the weight beside it",
                found=f"master {mismatch.master!r}",
                expected=f"weight {mismatch.weight!r}",
                where=f"element {mismatch.position} of {wanted.slice}",
                helps="the checkpoint is damaged, or its weights were edited after the save: use another iteration",
            )
        with self._lock:
            self.proven += masters.numel()

    def _weight(self, name: str, master: LogicalTensor) -> LogicalTensor:
        """The weight beside a master, in the shape that the target wants."""
        weight = self._source.logical_tensor(WEIGHT, name)
        if weight is None:
            raise UnreadableCheckpointError("a parameter with optimizer state has no weight", where=name)
        return replace(weight, shape=master.shape)


def _below(output: Output, folder: str) -> Output:
    """The same files in a folder of the destination, with the tracker file that names it."""
    if not folder:
        return output
    files = [replace(file, name=f"{folder}/{file.name}") for file in output.files]
    named = folder if folder == "release" else str(int(folder.removeprefix("iter_")))
    files.append(OutputFile(TRACKER_FILE, len(named), ((0, named.encode()),), last=True))
    return Output(files, [replace(record, file=f"{folder}/{record.file}") for record in output.records])


def _check_destination(destination: Path, source: Path, folder: str) -> None:
    """Refuse to replace more than a checkpoint of the same iteration, or the source itself."""
    if destination in (source, *source.parents) or source in destination.parents:
        raise DestinationError(
            "the destination would lie in its own source, or replace it", where=str(destination),
            helps="choose a folder beside it",
        )  # fmt: skip
    others = [path.name for path in destination.glob("iter_*") if path.name != folder] if destination.is_dir() else []
    if others:
        raise DestinationError(
            "the destination holds other iterations, which would be lost",
            found=", ".join(sorted(others)[:5]),
            where=str(destination),
            helps="choose another folder",
        )


def _state_of(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of every file below a folder."""
    found = []
    for path in sorted(folder.rglob("*")):
        status = path.stat()
        found.append((str(path.relative_to(folder)), status.st_size, status.st_mtime_ns))
    return found


def _check_unchanged(folder: Path, before: list[tuple[str, int, int]]) -> None:
    if _state_of(folder) != before:
        raise UnreadableCheckpointError(
            "the source changed while it was read; nothing was published",
            where=str(folder),
            helps="convert a checkpoint that no job is writing",
        )


def _tokenizer(path: str | os.PathLike[str] | None) -> dict[str, bytes]:
    """The small files of the folder that the user names.

    Raises:
        UnreadableCheckpointError: it has none.
    """
    if path is None:
        return {}
    found = companions(as_path(path))
    if not found:
        raise UnreadableCheckpointError("the folder holds no tokenizer", where=str(path), helps="--tokenizer PATH")
    return found


def _check_readable(folder: Path, source: Checkpoint, target: Target) -> None:
    """Open what was written, as a reader will, and compare what it says of itself with the source."""
    written = target.reads_back(folder)
    for kind in target.kinds:
        expected = sorted(set(source.names(kind)) - set(target.left_out))
        if sorted(written.names(kind)) != expected:
            raise DestinationError(
                "what was written does not read back as the source; nothing was published",
                found=f"{len(written.names(kind))} tensors of {kind}",
                expected=f"{len(expected)}",
                where=str(folder),
            )
