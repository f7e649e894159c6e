"""The legacy checkpoint format `torch`: a folder a model-parallel rank, `mp_rank_XX[_YYY][_ZZZ]`, with its own pickles.

Source: megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2 (`get_checkpoint_name`, `save_checkpoint`,
`find_checkpoint_rank_0`). `model_optim_rng.pt` holds the rank's `state_dict` under the rank's own names, and
`distrib_optim.pt` the flat buffers of its distributed optimizers. Only pickles are read on opening; tensors stay on
disk. The order of the `state_dict` is the order in which modules registered their parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.formats.legacy_weights import LegacyWeights, RankModel
from mcore_ckpt_ext.formats.portable_state import portable_child
from mcore_ckpt_ext.formats.unread import (
    COMMON_KEYS,
    UNKNOWN,
    Unread,
    in_common_state,
    in_optimizer,
    joined,
    tensors_in,
)
from mcore_ckpt_ext.layout.buckets import BucketKey
from mcore_ckpt_ext.layout.local_parameters import layers_of
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder, WitnessedOrder
from mcore_ckpt_ext.optimizers.description import MOMENTUM
from mcore_ckpt_ext.optimizers.dp_zero import LEGACY, buffer_arrays, legacy_optimizer
from mcore_ckpt_ext.optimizers.flat_buffers import FlatArray, FlatState, GroupKey
from mcore_ckpt_ext.optimizers.legacy_masters import MASTERS, LegacyMasters, RankOptimizers
from mcore_ckpt_ext.optimizers.legacy_masters import NAME as PER_PARAMETER
from mcore_ckpt_ext.optimizers.masters import with_masters
from mcore_ckpt_ext.optimizers.refusals import check_provable
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.storage.dcp_index import StoredObject
from mcore_ckpt_ext.storage.safe_pickle import TensorReference
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

NAME = "torch"
MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
STORED_ORDER = "the order of the stored model"
# In `distrib_optim.pt` a tensor lies below the optimizer's number, the buffer's, its dtypes and the kind's name.
_DEPTH_OF_BUFFERS = 5
_RANK_FOLDER = re.compile(r"^mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")
# What belongs to one rank alone; everything else is the same on all of them.
# What the optimizers that are not distributed keep of a parameter.
_STATES = "exp_avg|exp_avg_sq|momentum_buffer|step"
_PRIVATE = ("model", "optimizer", "rng_state", "rerun_state_machine")


def is_legacy(folder: Path) -> bool:
    """Whether an iteration folder is in this format (`_get_checkpoint_format`, checkpointing.py)."""
    return not (folder / "metadata.json").exists() and bool(_rank_folders(folder))


@dataclass(frozen=True)
class _RankState:
    """What one rank folder holds: the rank's numbers, and the unpickled state with tensors as references."""

    tensor: int
    pipeline: int
    expert: int
    folder: str
    state: Mapping[str, Any]

    @property
    def chunks(self) -> list[Mapping[str, Any]]:
        """The `state_dict` of each model chunk."""
        if "model" in self.state:
            return [self.state["model"]]
        count = sum(bool(re.fullmatch(r"model\d+", str(key))) for key in self.state)
        return [self.state[f"model{number}"] for number in range(count)]

    @property
    def optimizers(self) -> list[Mapping[str, Any]]:
        """The state of each chained optimizer: a list of several, or the only one itself."""
        found = self.state.get("optimizer") or []
        return list(found) if isinstance(found, list) else [found]


@dataclass(frozen=True)
class RankFile:
    """A file of a rank folder: the rank's numbers, and its unpickled content with tensors as references."""

    file: str
    tensor: int
    pipeline: int
    expert: int
    content: Mapping[Any, Any]


class LegacyCheckpoint(Checkpoint):
    """One iteration folder in the legacy format."""

    format = NAME

    def __init__(self, folder: Path, witnesses: Sequence[ParameterOrder] = ()) -> None:
        super().__init__(folder, witnesses)
        self._states: dict[str, Mapping[str, Any]] = {}

    @cached_property
    def common(self) -> dict[str, Any]:
        """What all ranks stored alike, from the first of them."""
        state = self._first_state
        archive = TorchArchive(self.reader, f"{_rank_folders(self.folder)[0]}/{MODEL_FILE}")
        shared = {key: value for key, value in state.items() if not str(key).startswith(_PRIVATE)}
        common: dict[str, Any] = archive.with_values(shared)
        common.setdefault("iteration", state.get("total_iters", 0))
        return common

    @cached_property
    def weights(self) -> LegacyWeights:
        """The model's arrays."""
        return LegacyWeights(self._rank_models(), self.arguments, self.layout)

    @cached_property
    @override
    def stored_optimizer_format(self) -> str | None:
        if self._buffer_files:
            return LEGACY
        return PER_PARAMETER if any(rank.optimizers for rank in self._ranks) else None

    @cached_property
    @override
    def optimizer(self) -> OptimizerState:
        check_provable(self, None, [str(self.optimizer_format)])
        if self.optimizer_format == LEGACY:
            return legacy_optimizer(self, FlatState(self._flat_arrays(), joined=True, chunked=False))
        if self.optimizer_format is None or self.arguments.use_distributed_optimizer:
            raise UnreadableCheckpointError(
                "the checkpoint holds no optimizer state",
                expected=f"{OPTIMIZER_FILE} in the rank folders, or `optimizer` in each {MODEL_FILE}",
                where=str(self.folder),
                helps="resume with --no-load-optim for the weights alone",
            )
        masters = LegacyMasters(self._rank_optimizers(), self.arguments, self.layout, self.transfer)
        return with_masters(masters, self.weights)

    @cached_property
    def experts_apart(self) -> bool:
        """One chained optimizer more than the dense chunks need."""
        return self._children > 1 + bool(self.arguments.overlap_param_gather_with_optimizer_step)

    def layers(self) -> list[list[range]]:
        """Global decoder layers by `[pipeline rank][virtual stage]`, counted from what the ranks stored.

        Layers are numbered stage by stage, all pipeline ranks in a stage (`get_transformer_layer_offset`,
        megatron/core/transformer/transformer_layer.py), however many each has.
        """
        stages = {rank.pipeline: [layers_of(chunk) for chunk in rank.chunks] for rank in self._ranks}
        order = [(rank, stage) for stage in range(self.layout.virtual_pipeline) for rank in sorted(stages)]
        counts = [stages[rank][stage] if stage < len(stages[rank]) else 0 for rank, stage in order]
        spans = {
            place: range(end - count, end)
            for place, count, end in zip(order, counts, accumulate(counts), strict=True)
        }
        return [[spans[rank, stage] for stage in range(self.layout.virtual_pipeline)] for rank in sorted(stages)]

    def orders(self) -> list[ParameterOrder]:
        """The order of the stored model first: it is the very order that made the gradient buffers."""
        return [WitnessedOrder(STORED_ORDER, self.weights.registered()), *super().orders()]

    @override
    def param_groups(self) -> list[dict[str, Any]]:
        return [
            group
            for rank in self._ranks
            for child in rank.optimizers
            for group in child.get("optimizer", child).get("param_groups", [])
        ]

    def chain(self) -> list[dict[str, Any]]:
        """Adam in mixed precision is what a DistributedOptimizer holds as well, and becomes one."""
        if self.optimizer_format != PER_PARAMETER:
            return []
        children = self._ranks[0].optimizers
        if all(MASTERS in child for child in children) and MOMENTUM not in self.optimizer.kinds:
            return []
        return [portable_child(child) for child in children]

    @override
    def grad_scaler(self) -> dict[str, Any] | None:
        first = self._ranks[0]
        scalers = [child["grad_scaler"] for child in first.optimizers if child.get("grad_scaler")]
        # The scale is a tensor.
        archive = TorchArchive(self.reader, f"{first.folder}/{MODEL_FILE}")
        return dict(archive.with_values(scalers[0])) if scalers else None

    @override
    def extra_states(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for rank in self._rank_models():
            archive = TorchArchive(self.reader, rank.place.file)
            for name, value in self.weights.extra_states(rank):
                if name not in found:
                    found[name] = archive.with_values(value)
        return found

    @override
    def random_states(self) -> Mapping[tuple[int, ...], Any]:
        found: dict[tuple[int, ...], Any] = {}
        for rank in self._ranks:
            if rank.state.get("rng_state") is not None and rank.expert == 0:
                archive = TorchArchive(self.reader, f"{rank.folder}/{MODEL_FILE}")
                found[rank.pipeline, rank.tensor] = archive.with_values(rank.state["rng_state"])
        return found

    @override
    def archives(self) -> Iterator[tuple[str, int, int]]:
        for file in (*(f"{rank.folder}/{MODEL_FILE}" for rank in self._ranks), *self._buffer_files):
            yield file, 0, self.reader.size(file)

    def rank_files(self) -> Iterator[RankFile]:
        """Every file of the checkpoint, its pickle read."""
        for rank in self._ranks:
            yield RankFile(f"{rank.folder}/{MODEL_FILE}", rank.tensor, rank.pipeline, rank.expert, rank.state)
        for rank, place, entries in self._buffers:
            yield RankFile(place.file, rank.tensor, rank.pipeline, rank.expert, dict(enumerate(entries)))

    def unread(self, *, objects: bool = True) -> list[Unread]:
        """Keys of several ranks are joined."""
        found: list[Unread] = []
        for rank in self._ranks:
            known = {*COMMON_KEYS, *(chunk for chunk in rank.state if _is_model(chunk)), "rng_state", "total_iters"}
            common = {key: value for key, value in rank.state.items() if key != "optimizer"}
            found += in_common_state(common, known)
            if self.stored_optimizer_format == PER_PARAMETER:
                found += (item for item in _unread_of(rank) if not _in_masters(item.key))
            else:
                found += _unread_of(rank)
            found += self._unknown_files(rank.folder)
        for *_, entries in self._buffers:
            for path, nbytes in tensors_in(entries, (OPTIMIZER_FILE,)):
                if len(path) != _DEPTH_OF_BUFFERS or not path[2].isdigit():
                    found.append(Unread(".".join(path), UNKNOWN, nbytes))
        return joined(found)

    def _unknown_files(self, folder: str) -> Iterator[Unread]:
        """Files beside those that are read, of optimizers that are not read (`layer_wise_optimizer_0.pt`)."""
        for path in sorted((self.folder / folder).glob("*.pt")):
            if path.name not in (MODEL_FILE, OPTIMIZER_FILE):
                yield Unread(path.name, UNKNOWN, path.stat().st_size)

    @cached_property
    def _first_state(self) -> Mapping[str, Any]:
        state = self._load(_rank_folders(self.folder)[0])
        version = state.get("checkpoint_version", 0)
        if "args" not in state or not isinstance(version, (int, float)) or version < 3.0:
            raise UnsupportedCheckpointError(
                "the checkpoint was written before Megatron-LM 2.6, in another layout of the attention's rows",
                found=f"checkpoint version {version}",
                expected="3.0, and the job's arguments",
                where=str(self.folder),
            )
        return state

    @cached_property
    def _ranks(self) -> list[_RankState]:
        """All rank folders, the first pipeline rank first."""
        pipelined = self.layout.pipeline > 1
        states = []
        for folder in _rank_folders(self.folder):
            match = _RANK_FOLDER.match(folder)
            tensor, *rest = [int(number) for number in match.groups() if number is not None] if match else [0]
            # Without pipeline parallelism the expert rank stands where otherwise the pipeline rank stands.
            pipeline, expert = (*rest, 0, 0)[:2] if pipelined else (0, (*rest, 0)[0])
            states.append(_RankState(tensor, pipeline, expert, folder, self._load(folder)))
        states.sort(key=lambda rank: (rank.pipeline, rank.expert, rank.tensor))
        self._check_complete(states)
        return states

    def _check_complete(self, ranks: Sequence[_RankState]) -> None:
        found = {(rank.tensor, rank.pipeline) for rank in ranks}
        expected = {(t, p) for t in range(self.layout.tensor) for p in range(self.layout.pipeline)}
        if found != expected:
            raise UnreadableCheckpointError(
                "the checkpoint does not have the rank folders of its own layout",
                found=f"{len(found)} (tensor, pipeline) ranks",
                expected=f"{len(expected)}, for {self.layout}",
                where=str(self.folder),
                helps="the save was interrupted or the copy is incomplete: use another iteration",
            )

    def _load(self, folder: str) -> Mapping[str, Any]:
        if folder not in self._states:
            file = f"{folder}/{MODEL_FILE}"
            state = TorchArchive(self.reader, file).load()
            if not isinstance(state, dict):
                raise UnreadableCheckpointError("a rank's state is no dict", found=type(state), where=file)
            self._states[folder] = state
        return self._states[folder]

    def _rank_models(self) -> Iterator[RankModel]:
        layers = self.layers()
        for rank in self._ranks:
            file = f"{rank.folder}/{MODEL_FILE}"
            place = StoredObject(file, 0, self.reader.size(file))
            for chunk, span in zip(rank.chunks, layers[rank.pipeline], strict=False):
                yield RankModel(rank.tensor, rank.expert, span.start, chunk, place)

    @cached_property
    def _buffer_files(self) -> dict[str, _RankState]:
        """The files of distributed optimizers."""
        files = {f"{rank.folder}/{OPTIMIZER_FILE}": rank for rank in self._ranks}
        return {file: rank for file, rank in files.items() if (self.folder / file).exists()}

    @cached_property
    def _buffers(self) -> list[tuple[_RankState, StoredObject, list[Any]]]:
        """The rank, the place and the entries, one for each chained optimizer, of each such file."""
        found = []
        for file, rank in self._buffer_files.items():
            content = TorchArchive(self.reader, file).load()
            place = StoredObject(file, 0, self.reader.size(file))
            found.append((rank, place, content if isinstance(content, list) else [content]))
        return found

    @property
    def _children(self) -> int:
        return max((len(entries) for *_, entries in self._buffers), default=1)

    def _flat_arrays(self) -> dict[GroupKey, Mapping[tuple[BucketKey, str], FlatArray]]:
        """Each chained optimizer's buffers, filed as `dp_group_idx` would file them (see `FlatBuffers`).

        A file has an entry for every child, None where another file has that child's state: the state of the dense
        parameters lies beside the first expert rank only (optimizer.py, `ChainedOptimizer.save_parameter_state`).
        """
        state: dict[GroupKey, Mapping[tuple[BucketKey, str], FlatArray]] = {}
        for rank, place, entries in self._buffers:
            for child, content in enumerate(entries):
                if content is not None:
                    experts = self.experts_apart and child == self._children - 1
                    index = self._expert_index(rank) if experts else rank.tensor + self.layout.tensor * rank.pipeline
                    state[child, index] = buffer_arrays(content, place, place.file)
        return state

    def _rank_optimizers(self) -> list[RankOptimizers]:
        """What each rank folder holds of its optimizers, and the parameters that they are for."""
        optimizers_of = {f"{rank.folder}/{MODEL_FILE}": rank.optimizers for rank in self._ranks}
        parameters: dict[str, list[tuple[str, TensorReference]]] = {}
        found: dict[str, RankOptimizers] = {}
        for rank, named in self.weights.models:
            file = rank.place.file
            own = parameters.setdefault(file, [])
            own.extend(named)
            found[file] = RankOptimizers(rank.tensor, rank.place, optimizers_of[file], own)
        return list(found.values())

    def _expert_index(self, rank: _RankState) -> int:
        """The rank's place among all expert ranks, counted in whichever of the two ways its version counts."""
        layout = self.layout
        if self.arguments.is_known("expert_tensor_parallel_size"):
            tensor = rank.tensor % layout.expert_tensor
            return tensor + layout.expert_tensor * (rank.expert + layout.expert * rank.pipeline)
        return rank.tensor + layout.tensor * (rank.pipeline + layout.pipeline * rank.expert)


def _is_model(key: object) -> bool:
    """Whether a rank's state holds a model chunk under a key."""
    return bool(re.fullmatch(r"model\d*", str(key)))


def _unread_of(rank: _RankState) -> Iterator[Unread]:
    for optimizer in rank.optimizers:
        yield from in_optimizer(optimizer)


def _in_masters(key: str) -> bool:
    """Whether a tensor is one that `LegacyMasters` reads: a master, or state by parameter number."""
    return bool(re.match(rf"optimizer\.({MASTERS}\.|(optimizer\.)?state\.\d+\.({_STATES})$)", key))


def _rank_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("mp_rank_*") if _RANK_FOLDER.match(path.name))
