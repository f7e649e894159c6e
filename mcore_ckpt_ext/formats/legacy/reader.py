"""Reads the legacy format `torch`: one folder for each model-parallel rank, `mp_rank_XX[_YYY][_ZZZ]`.

Source: megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2 (`save_checkpoint`, `generate_state_dict`).
`model_optim_rng.pt` contains the rank's `state_dict` with the rank's own names, and `distrib_optim.pt` the flat buffers
of its distributed optimizers. The order of the `state_dict` is the order in which modules registered their parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.evidence import Loading
from mcore_ckpt_ext.formats.expert_states import grouped_experts, split_state
from mcore_ckpt_ext.formats.holder import holder_of
from mcore_ckpt_ext.formats.legacy.optimizer_settings import OptimizerSettings
from mcore_ckpt_ext.formats.legacy.ranks import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    LegacyRank,
    RankBuffers,
    RankFolders,
    RankState,
    folder_names,
    is_model_chunk,
)
from mcore_ckpt_ext.formats.legacy.stored_parts import parts_of_legacy
from mcore_ckpt_ext.formats.legacy.weights import LegacyWeights, RankModel
from mcore_ckpt_ext.formats.open_options import DEFAULT_OPTIONS, OpenOptions
from mcore_ckpt_ext.formats.parts import Files, Job, States, StoredOptimizer, lazy
from mcore_ckpt_ext.formats.portable_state import has_experts
from mcore_ckpt_ext.formats.reader import FormatReader
from mcore_ckpt_ext.formats.unread_state import (
    COMMON_KEYS,
    UNKNOWN,
    UnreadState,
    merge_entries,
    tensors_in,
    unread_common_state,
    unread_optimizer_state,
)
from mcore_ckpt_ext.formats.view import OpenedFormat
from mcore_ckpt_ext.layout.buckets import BucketKey
from mcore_ckpt_ext.layout.local_parameters import layers_of
from mcore_ckpt_ext.layout.parallel import has_varying_layers, layers_by_chunk
from mcore_ckpt_ext.layout.parameter_order import ObservedOrder, ParameterOrder
from mcore_ckpt_ext.optimizers.derived_masters import with_masters
from mcore_ckpt_ext.optimizers.dp_zero import buffer_arrays, legacy_optimizer
from mcore_ckpt_ext.optimizers.flat_arrays import FlatArray, FlatState, GroupKey
from mcore_ckpt_ext.optimizers.legacy_masters import MASTERS, LegacyMasters
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.optimizers.table import legacy_format
from mcore_ckpt_ext.optimizers.unsupported import check_provable
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from mcore_ckpt_ext.storage.te_extra_state import UnknownStateError
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

NAME = "torch"
STORED_ORDER = "the order of the stored model"
# The path of a tensor in `distrib_optim.pt`: file, optimizer's number, buffer's number, dtypes, name of the kind.
_DEPTH_OF_BUFFERS = 5
# Keys whose values belong to one rank; all others are equal on all ranks.
_PRIVATE = ("model", "optimizer", "rng_state", "rerun_state_machine")
# States that optimizers other than distributed ones store for a parameter.
_STATES = "exp_avg|exp_avg_sq|momentum_buffer|step"


class LegacyCheckpoint(FormatReader):
    """One iteration folder in the legacy format."""

    name = NAME

    @classmethod
    @override
    def recognizes(cls, stored: FolderIndex) -> bool:
        """Return whether an iteration folder is in this format (`_get_checkpoint_format`, checkpointing.py)."""
        return not (stored.folder / "metadata.json").exists() and bool(folder_names(stored.folder))

    def __init__(self, folder: Path, options: OpenOptions = DEFAULT_OPTIONS) -> None:
        super().__init__(folder, options)
        self._folders = RankFolders(folder, self.files.reader)

    @cached_property
    @override
    def format(self) -> OpenedFormat:
        # Megatron locates rank folders by the running layout (`get_checkpoint_name`), whatever they contain.
        return replace(super().format, loading=Loading(in_megatron=True, by_rank=True))

    @cached_property
    @override
    def files(self) -> Files:
        return replace(
            super().files,
            stored_parts=lambda: parts_of_legacy(self.rank_files(), self.job.arguments()),
            archives=self._archives,
            unread=self._unread,
            rank_of=self._rank_of,
        )

    @cached_property
    @override
    def optimizer(self) -> StoredOptimizer:
        settings = lazy(lambda: OptimizerSettings(self._ranks, self._archive, str(self.folder)))
        return StoredOptimizer(
            state=lazy(self._optimizer_state),
            format=lazy(self._optimizer_format),
            has_expert_optimizer=lazy(self._has_expert_optimizer),
            param_groups=lambda: settings().param_groups(),
            chained_optimizer_settings=lambda: (
                settings().chained_optimizer_settings() if self._keeps_whole_state else []
            ),
            grad_scaler=lambda: settings().grad_scaler(),
        )

    @cached_property
    @override
    def job(self) -> Job:
        return replace(super().job, layers=self._layers, observed_orders=self._observed_orders)

    @cached_property
    @override
    def states(self) -> States:
        return States(self._extra_states, self._random_states)

    @override
    def _read_common(self) -> dict[str, Any]:
        """Read what all ranks stored alike, from the first rank."""
        first = self._folders.first
        shared = {key: value for key, value in first.state.items() if not str(key).startswith(_PRIVATE)}
        common: dict[str, Any] = self._archive(first).with_values(shared)
        if "total_iters" in first.state:
            common.setdefault("iteration", first.state["total_iters"])
        return common

    @cached_property
    def _weights(self) -> LegacyWeights:
        return LegacyWeights(self._rank_models(), self.job.arguments(), self.job.layout)

    def _optimizer_format(self) -> str | None:
        has_buffers = bool(self._buffer_files)
        return legacy_format(distributed=has_buffers) if has_buffers or self._keeps_whole_state else None

    @property
    def _keeps_whole_state(self) -> bool:
        """True if each rank's model file has the optimizer's state of its parameters."""
        return not self._buffer_files and any(rank.optimizers for rank in self._ranks)

    def _optimizer_state(self) -> OptimizerState:
        check_provable(holder_of(self.view), None, [str(self.optimizer.format())])
        if self._buffer_files:
            buffers = FlatState(self._flat_arrays(), joined=True, chunked=False)
            return with_masters(legacy_optimizer(holder_of(self.view), buffers), self._weights)
        if files := [
            file.name for rank_state in self._ranks for file in self._folders.layer_wise_files(rank_state.folder)
        ]:
            # The model's file has the parameters of the first data-parallel rank, which look like a complete optimizer.
            raise UnsupportedCheckpointError(
                "each data-parallel rank has its own optimizer file, which this version does not read",
                found=", ".join(sorted(set(files))),
                where=str(self.folder),
                hint="resume with --ckpt-format torch under its own layout and number of data-parallel ranks, which "
                "stock Megatron supports; or with --no-load-optim",
            )
        if self.optimizer.format() is None or self.job.arguments().use_distributed_optimizer:
            raise UnreadableCheckpointError(
                "the checkpoint holds no optimizer state",
                expected=f"{OPTIMIZER_FILE} in the rank folders, or `optimizer` in each {MODEL_FILE}",
                where=str(self.folder),
                hint="resume with --no-load-optim for the weights alone",
            )
        optimizers = self._weights.rank_optimizers({rank.file: rank.optimizers for rank in self._ranks})
        masters = LegacyMasters(optimizers, self.job.arguments(), self.job.layout, self.files.transfer)
        return with_masters(masters, self._weights, lambda: self.job.models().weights)

    def _has_expert_optimizer(self) -> bool:
        """Return whether experts have a chained optimizer of their own, or groups of their own.

        Such an optimizer is in addition to those of dense parameters.
        """
        if self._keeps_whole_state:
            return has_experts(child for rank in self._ranks for child in rank.optimizers)
        return self._children > 1 + bool(self.job.arguments().overlap_param_gather_with_optimizer_step)

    def _layers(self) -> list[list[range]]:
        """Return global decoder layers by `[pipeline rank][virtual stage]`.

        The stored model chunks are counted. Layers are numbered stage by stage, across all pipeline ranks within a
        stage (`get_transformer_layer_offset`, megatron/core/transformer/transformer_layer.py); chunks may have
        different numbers of layers.

        Raises:
            UnreadableCheckpointError: the number of layers differs from the job's, so that numbers would be wrong.
        """
        arguments = self.job.arguments()
        layout = self.job.layout
        # Some layers of such a model may have no parameters, and cannot be counted.
        if has_varying_layers(arguments) and (layers := layers_by_chunk(arguments, layout)) is not None:
            return layers
        stages = {
            rank_state.rank.pipeline: [layers_of(chunk) for chunk in rank_state.chunks] for rank_state in self._ranks
        }
        order = [(rank, stage) for stage in range(layout.virtual_pipeline) for rank in sorted(stages)]
        counts = [stages[rank][stage] if stage < len(stages[rank]) else 0 for rank, stage in order]
        expected = arguments.layer_counts
        if expected and any(counts) and sum(counts) not in expected:  # models with several blocks (T5) have no pipeline
            raise UnreadableCheckpointError(
                "the ranks' files contain another number of layers than the job had",
                found=f"{sum(counts)}, by stage {' + '.join(map(str, counts))}",
                expected=" or ".join(map(str, sorted(expected))),
                where=str(self.folder),
                hint="a file was edited, or is of another job: use another iteration",
            )
        spans = {
            place: range(end - count, end) for place, count, end in zip(order, counts, accumulate(counts), strict=True)
        }
        return [[spans[rank, stage] for stage in range(layout.virtual_pipeline)] for rank in sorted(stages)]

    def _observed_orders(self) -> Sequence[ParameterOrder]:
        """Return the order of the stored model, in which the gradient buffers were packed, then others."""
        return [ObservedOrder(STORED_ORDER, self._weights.registered_names()), *self.options.order_sources]

    def _extra_states(self) -> Mapping[str, Any]:
        states: dict[str, Any] = {}
        for rank in self._rank_models():
            archive = self.files.transfer.archive(rank.place.file)
            for name, value in self._weights.extra_states(rank):
                if name not in states:
                    states |= self._state_of_experts(name, archive.with_values(value), rank)
        return states

    def _state_of_experts(self, name: str, state: Any, rank: RankModel) -> dict[str, Any]:
        """Return a state by its name; a state of grouped experts is split by expert if possible."""
        count = (self.job.arguments().num_experts or 0) // self.job.layout.expert
        names = grouped_experts(name, range(rank.expert * count, (rank.expert + 1) * count))
        try:
            return dict(zip(names, split_state(state, count), strict=True)) if names else {name: state}
        except UnknownStateError:
            return {name: state}

    def _random_states(self) -> Mapping[tuple[int, ...], Any]:
        states: dict[tuple[int, ...], Any] = {}
        for rank_state in self._ranks:
            if rank_state.state.get("rng_state") is not None and rank_state.rank.expert == 0:
                states[rank_state.rank.pipeline, rank_state.rank.tensor] = self._archive(rank_state).with_values(
                    rank_state.state["rng_state"]
                )
        return states

    def _archives(self) -> Iterator[tuple[str, int, int]]:
        for file in (*(rank_state.file for rank_state in self._ranks), *(file for _, file in self._buffer_files)):
            yield file, 0, self.files.reader.size(file)

    def rank_files(self) -> Iterator[tuple[str, LegacyRank, Mapping[Any, Any]]]:
        """Yield each file, the rank that wrote it, and its content with tensors as references."""
        for rank_state in self._ranks:
            yield rank_state.file, rank_state.rank, rank_state.state
        for buffers in self._buffers:
            yield buffers.place.file, buffers.rank, dict(enumerate(buffers.children))

    def _rank_of(self, file: str) -> tuple[int, int, int]:
        (owner,) = (rank for name, rank, _ in self.rank_files() if name == file)
        return owner.tensor, owner.pipeline, owner.expert

    def _unread(self, *, objects: bool = True) -> list[UnreadState]:
        """Return stored keys that this package does not read, merging equal keys of several ranks."""
        unread_states: list[UnreadState] = []
        for rank_state in self._ranks:
            read_keys = {*COMMON_KEYS, *filter(is_model_chunk, rank_state.state), "rng_state", "total_iters"}
            common = {key: value for key, value in rank_state.state.items() if key != "optimizer"}
            unread_states += unread_common_state(common, read_keys)
            of_optimizers = [item for optimizer in rank_state.optimizers for item in unread_optimizer_state(optimizer)]
            if self._keeps_whole_state:
                of_optimizers = [item for item in of_optimizers if not _is_in_masters(item.key)]
            unread_states += of_optimizers
            unread_states += (
                UnreadState(f.name, UNKNOWN, f.stat().st_size) for f in self._folders.other_files(rank_state.folder)
            )
        for buffers in self._buffers:
            for path, nbytes in tensors_in(buffers.children, (OPTIMIZER_FILE,)):
                if len(path) != _DEPTH_OF_BUFFERS or not path[2].isdigit():
                    unread_states.append(UnreadState(".".join(path), UNKNOWN, nbytes))
        return merge_entries(unread_states)

    @cached_property
    def _ranks(self) -> list[RankState]:
        """The stored state of each rank, the first pipeline rank first."""
        return self._folders.states(self.job.layout)

    def _archive(self, rank_state: RankState) -> TorchArchive:
        return self.files.transfer.archive(rank_state.file)

    def _rank_models(self) -> Iterator[RankModel]:
        layers = self._layers()
        for rank_state in self._ranks:
            place = self._folders.place(rank_state.file)
            for chunk, span in zip(rank_state.chunks, layers[rank_state.rank.pipeline], strict=False):
                yield RankModel(rank_state.rank.tensor, rank_state.rank.expert, span.start, chunk, place)

    @cached_property
    def _buffer_files(self) -> list[tuple[LegacyRank, str]]:
        return self._folders.buffer_files(self._ranks)

    @cached_property
    def _buffers(self) -> list[RankBuffers]:
        return self._folders.buffers(self._buffer_files)

    @property
    def _children(self) -> int:
        return max((len(buffers.children) for buffers in self._buffers), default=1)

    def _flat_arrays(self) -> dict[GroupKey, Mapping[tuple[BucketKey, str], FlatArray]]:
        """Return each chained optimizer's buffers by the key that `dp_group_idx` would have.

        See `FlatBuffers` for the key.

        A file has an entry for every chained optimizer, None if another file has its state: only the first expert rank
        stores the state of the dense parameters (optimizer.py, `ChainedOptimizer.save_parameter_state`).
        """
        state: dict[GroupKey, Mapping[tuple[BucketKey, str], FlatArray]] = {}
        tensor_size = self.job.layout.tensor
        for buffers in self._buffers:
            rank = buffers.rank
            for child, content in enumerate(buffers.children):
                if content is not None:
                    experts = self.optimizer.has_expert_optimizer() and child == self._children - 1
                    index = self._expert_index(rank) if experts else rank.tensor + tensor_size * rank.pipeline
                    state[child, index] = buffer_arrays(content, buffers.place, buffers.place.file)
        return state

    def _expert_index(self, rank: LegacyRank) -> int:
        """Return the rank's position among all expert ranks, in the order that its version of Megatron uses."""
        layout = self.job.layout
        if self.job.arguments().is_set("expert_tensor_parallel_size"):
            tensor = rank.tensor % layout.expert_tensor
            return tensor + layout.expert_tensor * (rank.expert + layout.expert * rank.pipeline)
        return rank.tensor + layout.tensor * (rank.pipeline + layout.pipeline * rank.expert)


def _is_in_masters(key: str) -> bool:
    """Return whether `LegacyMasters` reads a tensor: a master, or state by parameter number."""
    return bool(re.match(rf"optimizer\.({MASTERS}\.|(optimizer\.)?state\.\d+\.({_STATES})$)", key))
