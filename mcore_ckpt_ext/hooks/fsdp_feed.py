"""Lets a job of Megatron-FSDP resume a checkpoint of any other format.

Its `load_checkpoint` builds a state dict of DTensors, lets torch's distributed checkpoint fill it, and takes it over
(`_load_base_checkpoint`, megatron/training/checkpointing.py, core_v0.14.0 to 0.19.2 and the development head of August
2026). Within the scope that this module opens, torch's reads the tensors by `DraftedReader`, as `convert --to
fsdp_dtensor` would have written them, instead of from files. Everything before and after it is stock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Set
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.errors import ModelMismatchError, ResumeRefusedError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.fsdp_names import GROUPS, MODEL, STATE, ModuleNames
from mcore_ckpt_ext.formats.fsdp_target import FsdpArray, FsdpTarget
from mcore_ckpt_ext.formats.plain_dcp import plain_backend
from mcore_ckpt_ext.formats.steps import check_step
from mcore_ckpt_ext.hooks.announce import announce
from mcore_ckpt_ext.hooks.drafted_reader import DraftedReader
from mcore_ckpt_ext.hooks.first_look import megatron_version
from mcore_ckpt_ext.hooks.legacy_feed import folder_named
from mcore_ckpt_ext.hooks.rebinding import rebound
from mcore_ckpt_ext.model_space.anatomy import VOCABULARY
from mcore_ckpt_ext.offline.filling import Filler
from mcore_ckpt_ext.offline.opening import open_source
from mcore_ckpt_ext.online.admission import check_lost, verify_checksums
from mcore_ckpt_ext.online.agreement import agreed, agreed_here, gather, rank_and_size, text_of
from mcore_ckpt_ext.optimizers.digests import check_digests
from mcore_ckpt_ext.optimizers.model_space_formats import FSDP_DTENSOR
from mcore_ckpt_ext.settings import ACCEPT_LOST, VERIFY_ALL
from mcore_ckpt_ext.targets import FsdpDtensor, LayerSpec

_TORCH = "torch.distributed.checkpoint"
_STEPS = "opt_param_scheduler.num_steps"


def is_of_fsdp(arguments: Any) -> bool:
    """Whether a job is one of Megatron-FSDP."""
    return arguments.ckpt_format == FSDP_DTENSOR and bool(getattr(arguments, "use_megatron_fsdp", False))


def load_into_fsdp(scope: MutableMapping[str, Any], directory: str | None, stock: Callable[[], Any]) -> Any:
    """A load of a job of Megatron-FSDP: stock's own, but of another format than its own by way of a `DraftedReader`.

    Args:
        scope: the globals of Megatron's checkpointing module.
        directory: the run folder.
        stock: calls the original with all its arguments.

    Raises:
        ResumeRefusedError: on every rank, where the checkpoint cannot be taken over.
    """
    arguments = scope["get_args"]()

    def look() -> Path | None:
        folder = folder_named(directory, arguments)
        return None if folder is None or plain_backend(folder) == FSDP_DTENSOR else folder

    folder = agreed("looking at the checkpoint", look)[0]
    if folder is None:
        return stock()
    started = time.monotonic()
    feed = agreed_here("opening the checkpoint", lambda: _Feed(folder, arguments))
    # Of a release, stock takes the weights alone.
    without = arguments.no_load_optim or folder.name == "release"
    with feed.open(scope), rebound(vars(arguments), no_load_rng=True, no_load_optim=without):
        result = stock()
    announce(f"{feed.summary()}, {time.monotonic() - started:.1f} s; random state starts anew")
    return result


class _Feed:
    """One checkpoint, handed to one load."""

    def __init__(self, folder: Path, arguments: Any) -> None:
        running = JobArguments.of(vars(arguments))
        if (running.pipeline_model_parallel_size or 1) > 1:
            raise UnsupportedCheckpointError(
                "it is not known how pipeline stages of Megatron-FSDP number their layers",
                found=f"--pipeline-model-parallel-size {running.pipeline_model_parallel_size}",
                expected="1", where=str(folder), helps="resume without pipeline stages",
            )  # fmt: skip
        self._folder = folder
        spec: LayerSpec = "local" if running.transformer_impl == "local" else "transformer_engine"
        self.checkpoint = open_source(folder, FsdpDtensor(transformer_impl=spec), None)
        experts_apart = (running.expert_model_parallel_size or 1) > 1
        # The checkpoint under the names that the running job has.
        self._target = FsdpTarget(self.checkpoint, megatron_version(), experts_apart, ModuleNames(running))
        self._filler = Filler(self.checkpoint, ACCEPT_LOST.value)
        self._reader: DraftedReader | None = None

    @contextmanager
    def open(self, scope: MutableMapping[str, Any]) -> Iterator[None]:
        """The scope within which Megatron's loader reads this checkpoint."""
        original, checkpointing = scope["_load_base_checkpoint"], import_module(_TORCH)
        load_state_dict = checkpointing.load_state_dict

        def load_base_checkpoint(*positional: Any, rank0: bool = False, **keywords: Any) -> Any:
            if rank0:
                known = {key: self.checkpoint.common.get(key) for key in ("iteration", "checkpoint_version")}
                kind = scope["CheckpointType"].FSDP_DTENSOR
                released = self._folder.name == "release"
                return {"args": self._target.common["args"], **known}, str(self._folder), released, kind
            within = rebound(vars(checkpointing), FileSystemReader=_no_files, load_state_dict=fill)
            with within, rebound(scope, _get_checkpoint_format=lambda *_: FSDP_DTENSOR):
                return original(*positional, rank0=rank0, **keywords)

        def fill(state_dict: dict[str, Any], *_: Any, **__: Any) -> None:
            self._fill(state_dict, load_state_dict)

        with rebound(scope, _load_base_checkpoint=load_base_checkpoint, FileSystemReader=_no_files):
            yield

    def summary(self) -> str:
        """What was done, over all ranks, in one line; collective."""
        read, proven = zip(*gather((self._reader.bytes_read if self._reader else 0, self._filler.proven)), strict=True)
        source = self.checkpoint
        how = f"proven {source.proof.words}" if source.proof.is_near else "proven equal to their weights"
        return (
            f"model and optimizer resumed from {source.layout} by Megatron-FSDP: {source.format}, "
            f"{source.optimizer_format or 'without optimizer'}, {sum(read) / 1e6:,.1f} MB read, "
            f"{sum(proven):,} masters {how}"
        )

    def _fill(self, state_dict: dict[str, Any], load: Callable[..., None]) -> None:
        """Fill a state dict by torch's own `load`; collective.

        Raises:
            ResumeRefusedError: on every rank; until the reading nothing is written.
        """
        planner = DefaultLoadPlanner(allow_partial_load=True)
        planner.set_up_planner(state_dict, Metadata({}))
        live = {key: value for key, value in planner.state_dict.items() if isinstance(value, torch.Tensor)}
        others = planner.state_dict.keys() - live.keys()
        every = {key for keys in gather(sorted(live)) for key in keys}
        planned = agreed_here(
            "planning the resume",
            lambda: self._planned(live, others, every),
            "nothing of the checkpoint is written yet",
        )
        self._reader = planned
        try:
            load(state_dict, planned, planner=DefaultLoadPlanner(allow_partial_load=True))
        except CheckpointException as error:
            raise ResumeRefusedError(
                "mcore_ckpt_ext refused while reading the model and the optimizer; they are partly written: do not "
                f"train on, start again\n  {text_of(error)}"
            ) from error

    def _planned(self, live: Mapping[str, torch.Tensor], others: Set[str], every: Set[str]) -> DraftedReader:
        """The reader of what this rank asks for.

        Args:
            live: the tensors by key.
            others: keys of everything else.
            every: keys of the tensors of all ranks.

        Raises:
            CheckpointError: checkpoint and job do not fit each other.
        """
        check_step(self.checkpoint)
        if VERIFY_ALL.value:
            verify_checksums(self.checkpoint, *rank_and_size())
        if any(key.startswith(STATE) for key in every):
            self._check_optimizer()
        arrays = {array.key: array for array in self._target.arrays()}
        unused = [key for key in arrays if key.startswith(MODEL) and key not in every]
        if unused:
            raise ModelMismatchError(
                "the checkpoint holds parameters that the model does not have",
                found=f"{len(unused)} of them, {', '.join(unused[:3])}", where=str(self._folder),
                helps="resume with the model arguments that the checkpoint was written with (layers, hidden size, ...)",
            )  # fmt: skip
        objects = dict(self._target.objects())
        needed = [key for key in others if key == _STEPS or (key.startswith(GROUPS) and key.endswith(".step"))]
        for key in (*live, *needed):
            if key not in (arrays if key in live else objects):
                raise ModelMismatchError(
                    "the job has something that the checkpoint lacks", where=f"{key}, {self._folder}",
                    helps="resume with the model and optimizer arguments that the checkpoint was written with",
                )  # fmt: skip
        return DraftedReader({key: self._fitted(arrays[key], live[key]) for key in live}, objects, self._filler)

    def _check_optimizer(self) -> None:
        if self.checkpoint.optimizer_format is None:
            raise ModelMismatchError(
                "the checkpoint has no optimizer state", where=str(self._folder), helps="resume with --finetune"
            )
        if not ACCEPT_LOST.value:
            check_lost(self.checkpoint)
        for buffers in self.checkpoint.optimizer.buffers:
            check_digests(buffers, str(self._folder), rank_and_size())

    def _fitted(self, array: FsdpArray, live: torch.Tensor) -> FsdpArray:
        """An array in the shape of the live tensor: the vocabulary may be padded otherwise.

        Raises:
            ModelMismatchError: they differ in more than that, or rows of tokens would be lost.
            UnsupportedCheckpointError: the live one would round it.
        """
        if str(live.dtype) != f"torch.{array.tensor.dtype}":
            raise UnsupportedCheckpointError(
                "the job would round what the checkpoint holds", found=f"{live.dtype}",
                expected=array.tensor.dtype, where=array.key,
                helps="keep masters and moments in fp32 (--megatron-fsdp-main-params-dtype fp32, --exp-avg-dtype fp32, "
                "--exp-avg-sq-dtype fp32)",
            )  # fmt: skip
        shape = tuple(live.shape)
        may_pad = array.tensor.name in VOCABULARY and shape[1:] == array.shape[1:]
        if shape != array.shape and not (may_pad and shape[0] >= (self.checkpoint.tokens or 0)):
            raise ModelMismatchError(
                "the model and the checkpoint disagree about the shape of a parameter",
                found=f"{array.shape} in the checkpoint", expected=f"{shape}", where=array.key,
                helps="resume with the model arguments that the checkpoint was written with",
            )  # fmt: skip
        return replace(array, shape=shape, tensor=replace(array.tensor, shape=shape)) if may_pad else array


def _no_files(*_: Any, **__: Any) -> Any:
    """In place of torch's reader of the folder, which holds no index of what Megatron-FSDP asks for."""
    return _NoFiles()


class _NoFiles:
    @staticmethod
    def read_metadata() -> Metadata:
        return Metadata({})
