"""Passes a checkpoint to jobs of Megatron-FSDP and torch's FSDP, which load by torch's DCP.

Their `load_checkpoint` builds a state dict of DTensors, lets torch fill it, and loads it (`_load_base_checkpoint`,
megatron/training/checkpointing.py, core_v0.12.0 to 0.19.2 and the development head of August 2026). Within the scope
that this module opens, torch reads the tensors by a `VirtualStorageReader` instead of from files. Everything before and
after it is stock.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from mcore_ckpt_ext.collectives import gather, text_of
from mcore_ckpt_ext.errors import ModelMismatchError, ResumeRefusedError, UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.formats.accounts import account_of_load
from mcore_ckpt_ext.formats.fsdp.writer import FsdpArray
from mcore_ckpt_ext.formats.steps import check_step
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.differences import SAME_MODEL
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.live.job_ranks import perform
from mcore_ckpt_ext.megatron.live.phases import Phase, Who
from mcore_ckpt_ext.megatron.live.planning import CHECKSUMS, LOST_STATE, PLAN, RECORDED_DIGESTS
from mcore_ckpt_ext.megatron.live.resume import Resume, ResumeOptions
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.sources.virtual_storage_reader import VirtualStorageReader
from mcore_ckpt_ext.model_space.anatomy import VOCABULARY
from mcore_ckpt_ext.operations.block_reader import BlockReader
from mcore_ckpt_ext.patching.overrides import Scope, overridden
from mcore_ckpt_ext.settings import ACCEPT_LOST, VERIFY_ALL
from mcore_ckpt_ext.storage.dtypes import with_torch_dtypes

_TORCH = "torch.distributed.checkpoint"
STEPS = "opt_param_scheduler.num_steps"


class DcpStorageAdapter(ABC):
    """One checkpoint for one load.

    Attributes:
        checkpoint: the checkpoint.
        arguments: the arguments of the job that wrote it; this job compares them with its own.
    """

    backend: ClassVar[str]
    """The job's own format."""
    whose: ClassVar[str]
    """The kind of job, for messages."""
    exact: ClassVar[str]
    """How to keep values that would be rounded, for messages."""

    checkpoint: CheckpointView
    arguments: Any

    def __init__(self, session: LoadSession, checkpoint: CheckpointView, running: JobArguments) -> None:
        self._folder = session.folder
        self.checkpoint = checkpoint
        self.resume = Resume(session, running, ResumeOptions(VERIFY_ALL.value, ACCEPT_LOST.value))
        self.resume.opened = checkpoint
        self._filler = BlockReader(checkpoint, ACCEPT_LOST.value)
        self._reader: VirtualStorageReader | None = None
        self._fills_optimizer = False

    @abstractmethod
    def arrays(self) -> Mapping[str, FsdpArray]:
        """Return the arrays that the job may request, by key."""

    @abstractmethod
    def objects(self) -> Mapping[str, Any]:
        """Return the other objects that the job may request, by key."""

    @abstractmethod
    def is_wanted(self, key: str, *, is_tensor: bool) -> bool:
        """Return True if the checkpoint must have a requested key; else the job keeps its own value."""

    @abstractmethod
    def check_used(self, arrays: Mapping[str, FsdpArray], every: Set[str]) -> None:
        """Refuse a job that leaves parameters of the checkpoint unused.

        Args:
            arrays: the result of `arrays`.
            every: the keys of the tensors of all ranks.

        Raises:
            ModelMismatchError: parameters are unused.
        """

    @abstractmethod
    def complete(self, state_dict: Mapping[str, Any]) -> None:
        """Insert values into a job's state dict that it needs and does not request."""

    def load(self, scope: Scope, arguments: Any, stock: Callable[[], Any]) -> tuple[Any, str]:
        """Load the checkpoint by stock Megatron's function, without random states.

        Returns:
            The result of that function, and a summary.
        """
        started = time.monotonic()
        # From a release, stock Megatron only loads the weights.
        without = arguments.no_load_optim or self._folder.name == "release"
        with self._open(scope), overridden(vars(arguments), no_load_rng=True, no_load_optim=without):
            result = stock()
        return result, f"{self._summary()}, {time.monotonic() - started:.1f} s"

    @contextmanager
    def _open(self, scope: Scope) -> Iterator[None]:
        """Let Megatron's loader read this checkpoint within this scope."""
        original = scope["_load_base_checkpoint"]
        checkpointing = import_module(_TORCH)
        load_state_dict = checkpointing.load_state_dict

        def load_base_checkpoint(*positional: Any, rank0: bool = False, **keywords: Any) -> Any:
            if rank0:
                common = {key: self.checkpoint.job.common().get(key) for key in ("iteration", "checkpoint_version")}
                kind = scope["CheckpointType"][self.backend.upper()]
                is_release = self._folder.name == "release"
                return with_torch_dtypes({"args": self.arguments, **common}), str(self._folder), is_release, kind
            within = overridden(vars(checkpointing), FileSystemReader=_no_files, load_state_dict=fill)
            with within, overridden(scope, _get_checkpoint_format=lambda *_: self.backend):
                return original(*positional, rank0=rank0, **keywords)

        def fill(state_dict: dict[str, Any], *_: Any, **__: Any) -> None:
            self._fill(state_dict, load_state_dict)

        readers = {"FileSystemReader": _no_files} if "FileSystemReader" in scope else {}
        with overridden(scope, _load_base_checkpoint=load_base_checkpoint, **readers):
            yield

    def _summary(self) -> str:
        """Summarize the load over all ranks in one line. Collective."""
        read, proven = zip(*gather((self._reader.bytes_read if self._reader else 0, self._filler.proven)), strict=True)
        source = self.checkpoint
        how = (
            f"verified {source.job.master_check.relation}"
            if source.job.master_check.is_approximate
            else "verified equal to their weights"
        )
        content, detail = (
            ("model and optimizer", source.optimizer.format()) if self._fills_optimizer else ("weights", "alone")
        )
        rest = account_of_load(source).sentence
        return (
            f"{content} resumed from {source.job.layout} by {self.whose}: {source.format.name}, {detail}, "
            f"{sum(read) / 1e6:,.1f} MB read, {quantity(sum(proven), 'master')} {how}"
            f"{f'; {rest}' if rest else ''}"
        )

    def _fill(self, state_dict: dict[str, Any], load: Callable[..., None]) -> None:
        """Fill a state dict by torch's own `load`. Collective.

        Raises:
            ResumeRefusedError: on every rank; nothing is written before the tensors are read.
        """
        planner = DefaultLoadPlanner(allow_partial_load=True)
        planner.set_up_planner(state_dict, Metadata({}))
        live = {key: value for key, value in planner.state_dict.items() if isinstance(value, torch.Tensor)}
        others = planner.state_dict.keys() - live.keys()
        every = {key for keys in gather(sorted(live)) for key in keys}
        self._fills_optimizer = any(
            key.startswith("optimizer.") and self.is_wanted(key, is_tensor=True) for key in every
        )
        of_optimizer = (_STORED_OPTIMIZER, LOST_STATE, RECORDED_DIGESTS) if self._fills_optimizer else ()
        perform((_STEP, CHECKSUMS, *of_optimizer, PLAN), self.resume, _Request(self, state_dict, live, others, every))
        try:
            load(state_dict, self._reader, planner=DefaultLoadPlanner(allow_partial_load=True))
        except CheckpointException as error:
            raise ResumeRefusedError(
                "mcore_ckpt_ext refused while reading the model and the optimizer; they are partly written: do not "
                f"train on, start again\n  {text_of(error)}"
            ) from error

    def plan(self, live: Mapping[str, torch.Tensor], others: Set[str], every: Set[str]) -> None:
        """Plan the reads for the request of this rank.

        Args:
            live: the tensors by key.
            others: the keys of everything else.
            every: the keys of the tensors of all ranks.

        Raises:
            CheckpointError: the checkpoint does not fit the job.
        """
        arrays = self.arrays()
        objects = self.objects()
        self.check_used(arrays, every)
        requested = [key for key in live if self.is_wanted(key, is_tensor=True) or key in arrays]
        needed = [key for key in others if self.is_wanted(key, is_tensor=False)]
        for key in (*requested, *needed):
            if key not in (arrays if key in live else objects):
                raise ModelMismatchError(
                    "the job has state that the checkpoint lacks",
                    where=f"{key}, {self._folder}",
                    hint="resume with the model and optimizer arguments that the checkpoint was written with",
                )
        fitted = {key: self._fit(arrays[key], live[key]) for key in requested}
        self._reader = VirtualStorageReader(fitted, objects, self._filler)

    def _fit(self, array: FsdpArray, live: torch.Tensor) -> FsdpArray:
        """Return an array in the shape of the live tensor: the padding of the vocabulary may differ.

        Raises:
            ModelMismatchError: the shapes differ otherwise, or rows of tokens would be lost.
            UnsupportedCheckpointError: the live tensor would round the values.
        """
        if str(live.dtype) != f"torch.{array.tensor.dtype}":
            raise UnsupportedCheckpointError(
                "the job would round the checkpoint's values",
                found=f"{live.dtype}",
                expected=array.tensor.dtype,
                where=array.key,
                hint=self.exact,
            )
        shape = tuple(live.shape)
        may_pad = array.tensor.name in VOCABULARY and shape[1:] == array.shape[1:]
        if shape != array.shape and not (may_pad and shape[0] >= (self.checkpoint.job.tokens or 0)):
            raise ModelMismatchError(
                "a parameter has different shapes in the model and the checkpoint",
                found=f"{array.shape} in the checkpoint",
                expected=f"{shape}",
                where=array.key,
                hint=SAME_MODEL,
            )
        return replace(array, shape=shape, tensor=replace(array.tensor, shape=shape)) if may_pad else array


class _Request(NamedTuple):
    """The request of this rank's job; the arguments of `DcpStorageAdapter.plan`."""

    adapter: DcpStorageAdapter
    state_dict: Mapping[str, Any]
    live: Mapping[str, torch.Tensor]
    others: Set[str]
    every: Set[str]

    def plan(self, resume: Resume) -> None:
        self.adapter.plan(self.live, self.others, self.every)
        self.adapter.complete(self.state_dict)


def _check_stored_optimizer(resume: Resume) -> None:
    if resume.checkpoint.optimizer.format() is None:
        raise ModelMismatchError(
            "the checkpoint has no optimizer state", where=str(resume.session.folder), hint="resume with --finetune"
        )


_STEP = Phase(
    "planning the resume",
    Who.EVERY_RANK,
    lambda resume: check_step(resume.checkpoint),
    consequence="nothing of the checkpoint is written yet",
)
_STORED_OPTIMIZER = Phase("planning the resume", Who.EVERY_RANK, _check_stored_optimizer)


def _no_files(*_: Any, **__: Any) -> Any:
    """Replace torch's reader of the folder, which has no index of the keys that these jobs request."""
    return SimpleNamespace(read_metadata=lambda: Metadata({}))
