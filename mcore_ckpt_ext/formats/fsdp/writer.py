"""Writes `fsdp_dtensor` for jobs with `--use-megatron-fsdp`, under any tensor and data parallel size.

Sources: `load_checkpoint` and `_load_base_checkpoint` (megatron/training/checkpointing.py),
`_param2group_meta_to_param_groups` (megatron/core/optimizer/distrib_optimizer.py), core_v0.14.0 to 0.19.2. Every name
that the job requests must exist, unless it has `--no-strict-fsdp-dtensor-load`; keys are flat, as torch flattens dicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from mcore_ckpt_ext.continuity.data_order import changed_history
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.formats.distcp_files import Array, Chunk, DistcpFiles
from mcore_ckpt_ext.formats.fsdp.names import GROUPS, HALVES, MODEL, STATE, ModuleNames
from mcore_ckpt_ext.formats.fsdp.options import FsdpDtensor
from mcore_ckpt_ext.formats.laid_out import OutputPlan, check_iteration, iteration
from mcore_ckpt_ext.formats.param_group_assignment import group_that_holds
from mcore_ckpt_ext.formats.plain_dcp import FSDP_DTENSOR
from mcore_ckpt_ext.formats.portable_state import PortableState, distinct_groups, known_arguments
from mcore_ckpt_ext.formats.target import version_number
from mcore_ckpt_ext.formats.unread_state import COMMON_KEYS
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.vocabulary import vocabulary_rows
from mcore_ckpt_ext.job.releases import LOADS_FSDP_DTENSOR
from mcore_ckpt_ext.model_space.anatomy import VOCABULARY
from mcore_ckpt_ext.model_space.names import is_module_buffer
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ, FP32_PARAM, PARAM_REMAINDER, WEIGHT, LogicalTensor
from mcore_ckpt_ext.planning.plan import ITEM_SIZE, TargetSlice, named_tensor
from mcore_ckpt_ext.planning.write_plan import Output, OutputFile

_CHUNK_BYTES = 128 << 20
_MOMENTS = (EXP_AVG, EXP_AVG_SQ)


@dataclass(frozen=True)
class FsdpArray:
    """An array with its key: `shape[0]` rows of a tensor of some kind, from row `first` on."""

    key: str
    shape: tuple[int, ...]
    kind: str
    tensor: LogicalTensor
    first: int

    def target_slice(self, offsets: Sequence[int], sizes: Sequence[int]) -> TargetSlice:
        """Return the slice for a part of the array; padding of the vocabulary may differ from the source's."""
        name = self.tensor.name
        place = (self.first + offsets[0], *offsets[1:]) if self.shape else ()
        may_pad = name in VOCABULARY
        return TargetSlice(self.kind, Slice.whole((Region(name, place, tuple(sizes)),)), {name: self.tensor}, may_pad)


class FsdpTarget:
    """Lays out one iteration folder.

    Args:
        checkpoint: the source.
        version: the version of Megatron that will read it.
        has_expert_optimizer: whether experts have separate parameter groups, as with expert parallelism.
        names: the names of the job that will read it, if they differ from the source's.
    """

    def __init__(
        self,
        checkpoint: CheckpointView,
        version: tuple[int, int],
        has_expert_optimizer: bool,
        names: ModuleNames | None = None,
    ) -> None:
        """Raise UnsupportedCheckpointError if that version, or Megatron-FSDP, does not support the job."""
        if not LOADS_FSDP_DTENSOR.is_of(version):
            raise UnsupportedCheckpointError(
                "that version of Megatron does not have this format",
                found=f"--megatron-version {_join_dots(version)}",
                expected=f"{LOADS_FSDP_DTENSOR.since} or later",
                hint="use --to torch_dist",
            )
        self._checkpoint = checkpoint
        self._arguments = checkpoint.job.arguments()
        self._has_expert_optimizer = has_expert_optimizer
        self._modules = names or ModuleNames(self._arguments)
        self._state = PortableState.of(checkpoint, known_arguments(self._arguments), version)
        self._optimizer = checkpoint.optimizer.state() if checkpoint.optimizer.format() else None
        if self._optimizer is not None:
            self._check_kinds(self._optimizer.carried_kinds)

    def _check_kinds(self, kinds: Sequence[str]) -> None:
        if set(kinds) - {FP32_PARAM} != set(_MOMENTS):
            raise UnsupportedCheckpointError(
                "Megatron-FSDP trains with Adam, and this is the state of another optimizer",
                found=", ".join(kinds),
                expected=", ".join((FP32_PARAM, *_MOMENTS)),
                where=str(self._checkpoint.files.folder),
                hint="--drop optimizer converts the weights alone",
            )

    def output(self) -> Output:
        """Plan all files of the folder, and the location of each tensor."""
        writer = DistcpFiles()
        for key, value in self.objects():
            writer.add_object(key, value, wrapped=False)
        for array in self.arrays():
            writer.add_array(Array(array.key, array.shape, array.tensor.dtype, tuple(_chunks(array))))
        files, records, metadata = writer.finish(with_shapes=False)
        index = OutputFile(".metadata", len(metadata), ((0, metadata),), last=True)
        afresh = "the state of the random generators is not converted: resume with --no-load-rng"
        return Output([*files, index], records, (*self._state.notes, *self._about_roundings(), afresh))

    def _about_roundings(self) -> Iterator[str]:
        """Warn if rounding the masters may give other weights than the source has."""
        joined = self._optimizer is not None and PARAM_REMAINDER in self._optimizer.kinds
        if joined or self._checkpoint.job.master_check.is_approximate:
            yield (
                "the weights are not written: the job that reads makes them by rounding the masters, which here may "
                "differ from the stored ones in the last bit" + ("" if joined else ", or more: those have fewer bits")
            )

    def arrays(self) -> Iterator[FsdpArray]:
        """Yield all arrays: weights or their masters, and moments."""
        for name in self._checkpoint.names(WEIGHT):
            yield from self._array(MODEL, name, "", *self._main(name))
        for kind in _MOMENTS if self._optimizer is not None else ():
            for name in self._checkpoint.names(kind):
                yield from self._array(STATE, name, f".{kind}", kind, named_tensor(self._checkpoint, kind, name))

    def _main(self, name: str) -> tuple[str, LogicalTensor]:
        """Return the master to write for a weight: if there is none, the weight with the dtype of masters."""
        weight = named_tensor(self._checkpoint, WEIGHT, name)
        if is_module_buffer(name):
            return WEIGHT, weight
        is_trained = self._optimizer is not None and self._optimizer.logical_tensor(FP32_PARAM, name) is not None
        return FP32_PARAM if is_trained else WEIGHT, LogicalTensor(name, weight.shape, "float32")

    def _array(self, prefix: str, name: str, suffix: str, kind: str, tensor: LogicalTensor) -> Iterator[FsdpArray]:
        """Yield a tensor as one array, or as two halves."""
        parts = [f"_{half}" for half in HALVES] if self._modules.halves(name) else [""]
        rows = (tensor.shape[0] if tensor.shape else 1) // len(parts)
        for number, part in enumerate(parts):
            key = f"{prefix}{self._modules.of(name)}{part}{suffix}"
            yield FsdpArray(key, (rows, *tensor.shape[1:]) if tensor.shape else (), kind, tensor, number * rows)

    def objects(self) -> Iterator[tuple[str, Any]]:
        """Yield pickled objects by key."""
        for key, value in self.common.items():
            if isinstance(value, Mapping):
                yield from ((f"{key}.{name}", inner) for name, inner in value.items())
            else:
                yield key, value
        if self._optimizer is None:
            return
        by_child = distinct_groups(self._checkpoint.optimizer.param_groups(), self._has_expert_optimizer)
        groups = [group for of_child in by_child for group in of_child]
        for name in self._optimizer.names():
            for setting, value in self._group_of(name, groups).items():
                yield f"{GROUPS}{self._modules.of(name)}.{setting}", value

    def _group_of(self, name: str, groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the group that a parameter is in.

        Raises:
            UnsupportedCheckpointError: see `group_that_holds`.
        """
        number = group_that_holds(name, named_tensor(self._checkpoint, WEIGHT, name).shape, groups, self._arguments)
        return groups[number]

    @cached_property
    def common(self) -> dict[str, Any]:
        """State that belongs to no tensor or parameter: `args`, `iteration`, the scheduler and so on."""
        common = {key: value for key, value in self._state.common.items() if key in COMMON_KEYS}
        common.pop("content_metadata", None)
        arguments = common["args"]
        pipeline = self._checkpoint.job.layout.pipeline
        changes: dict[str, Any] = {
            "ckpt_format": FSDP_DTENSOR,
            "use_dist_ckpt": True,
            "use_megatron_fsdp": True,
            "no_save_rng": True,
            "use_distributed_optimizer": True,
            "no_save_optim": self._optimizer is None,
            "pipeline_model_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": None,
            "transformer_pipeline_model_parallel_size": 1,
            "data_parallel_size": pipeline * self._checkpoint.job.layout.data,
            "padded_vocab_size": vocabulary_rows(self._checkpoint),
        }
        written = self._checkpoint.job.arguments()
        for name, value in {**changes, **changed_history(written, written.replace(**changes))}.items():
            setattr(arguments, name, value)
        return common


def _chunks(array: FsdpArray) -> Iterator[Chunk]:
    """Yield rows of an array in chunks of limited size."""
    shape = array.shape
    rows = shape[0] if shape else 1
    step = max(1, _CHUNK_BYTES // max(1, prod(shape[1:]) * ITEM_SIZE[array.tensor.dtype]))
    for begin in range(0, max(rows, 1), step):
        offsets = (begin, *(0,) * (len(shape) - 1)) if shape else ()
        sizes = (min(step, rows - begin), *shape[1:]) if shape else ()
        yield Chunk(offsets, sizes, array.target_slice(offsets, sizes))


def _join_dots(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def lay_out(checkpoint: CheckpointView, target: FsdpDtensor, family: Family | None) -> OutputPlan:
    """Lay out a run folder with one iteration.

    Raises:
        UnsupportedCheckpointError: the format, or that version, cannot hold this checkpoint.
    """
    check_iteration(checkpoint, target)
    expert = target.expert_model_parallel_size
    has_expert_optimizer = checkpoint.optimizer.has_expert_optimizer() if expert is None else expert > 1
    written = FsdpTarget(checkpoint, version_number(target.megatron_version), has_expert_optimizer)
    return iteration(checkpoint, target, written.output())
