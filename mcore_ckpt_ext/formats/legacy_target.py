"""Writing the legacy format `torch`: each model-parallel rank's own pickles, for one layout.

Sources: `save_checkpoint`, `get_checkpoint_name` and `generate_state_dict` (megatron/training/checkpointing.py),
`DistributedOptimizer.get_parameter_state_dp_zero` and `ChainedOptimizer.save_parameter_state`,
megatron/core/optimizer, core_v0.9.0 to 0.19.2. The optimizer is that of `--use-distributed-optimizer`.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, cast

import torch

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.formats.legacy_whole_state import WholeStates
from mcore_ckpt_ext.formats.portable_state import (
    distinct_groups,
    portable_arguments,
    portable_chain,
    writable_extra_states,
    writable_random_states,
    writable_state,
)
from mcore_ckpt_ext.formats.reader_order import order_for
from mcore_ckpt_ext.layout.grad_buffer import PackingRule
from mcore_ckpt_ext.layout.local_model import LocalModels, ModelRank, StoredWeight
from mcore_ckpt_ext.layout.local_parameters import LocalNames, shard_grid
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder, registration_order
from mcore_ckpt_ext.layout.proposals import PackedBuffer, packed_buffers
from mcore_ckpt_ext.model_space.names import EXTRA_STATE, OUTPUT_LAYER, WORD_EMBEDDINGS, of_experts, parse
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT, LogicalTensor
from mcore_ckpt_ext.optimizers.flat_buffers import KINDS
from mcore_ckpt_ext.planning.output import Output, OutputFile, Placed, Record
from mcore_ckpt_ext.planning.plan import WantedSlice
from mcore_ckpt_ext.storage.archive_layout import archive_layout
from mcore_ckpt_ext.storage.pickling import DeclaredTensor

OLDEST = (0, 9)
_VOCABULARY = (WORD_EMBEDDINGS, OUTPUT_LAYER, "output_layer.bias")
# Which state a job's own data iterators and retries are in says nothing to other ranks.
_NOT_CARRIED = ("optimizer", "content_metadata", "rerun_state_machine")
_STATE_NAMES = {kind: state for state, kind in KINDS.items()}


@dataclass(frozen=True)
class _Rank:
    tensor: int
    pipeline: int
    expert: int

    def folder(self, layout: ParallelLayout) -> str:
        """`get_checkpoint_name`."""
        pipeline = f"_{self.pipeline:03d}" if layout.pipeline > 1 else ""
        expert = f"_{self.expert:03d}" if layout.expert > 1 else ""
        return f"mp_rank_{self.tensor:02d}{pipeline}{expert}"


class LegacyTarget:
    """Lays out one iteration folder for a layout that the given arguments describe.

    `arguments`: Megatron's arguments of the job that will read it.
    """

    def __init__(self, checkpoint: Checkpoint, arguments: JobArguments, version: tuple[int, int]) -> None:
        """Raises: UnsupportedCheckpointError, where that layout or version cannot be written."""
        if version < OLDEST:
            raise UnsupportedCheckpointError(
                "legacy files are not written for that version", found=f"{version[0]}.{version[1]}",
                expected=f"{OLDEST[0]}.{OLDEST[1]} or later",
            )  # fmt: skip
        self._checkpoint = checkpoint
        self._arguments = arguments
        self._version = version
        self.layout = ParallelLayout.from_arguments(arguments)
        if self.layout.expert > 1 and self.layout.expert_tensor != self.layout.tensor:
            raise UnsupportedCheckpointError(
                "legacy files do not say which part of its experts a rank has", found=str(self.layout),
                helps="choose expert and model tensor parallel sizes that are equal, or convert --to torch_dist",
            )  # fmt: skip
        if arguments.overlap_param_gather_with_optimizer_step:
            raise UnsupportedCheckpointError(
                "--overlap-param-gather-with-optimizer-step splits the optimizer in a way that is not written",
                helps="convert --to torch_dist",
            )
        self._names = LocalNames(self._arguments)
        self._left_out: list[str] = []

    def output(self) -> Output:
        """All rank files, and where each tensor goes."""
        files: list[OutputFile] = []
        records: list[Record] = []
        for rank in self._ranks():
            states: dict[str, Any] = {"model_optim_rng.pt": self._state(rank)}
            optimizers = self._optimizers(rank)
            if any(optimizer is not None for optimizer in optimizers):
                states["distrib_optim.pt"] = optimizers if len(optimizers) > 1 else optimizers[0]
            for name, state in states.items():
                path = f"{rank.folder(self.layout)}/{name}"
                archive = archive_layout(state)
                files.append(OutputFile(path, archive.length, archive.literals))
                for tensor in archive.tensors:
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    content = cast("tuple[Placed, ...]", tensor.tag)  # the tags that this module gives
                    records.append(Record(path, tensor.offset, dtype, tensor.numel, content, tensor.checksums))
        return Output(files, records, tuple(self._notes()))

    def _notes(self) -> Iterator[str]:
        """What the job that reads the files has to know."""
        if self._whole is None:
            yield f"parameters in gradient buffers: the order of {self._order.label}"
        else:
            yield "the optimizer is written as it was: without --use-distributed-optimizer"
        if rows := self._arguments.padded_vocab_size:
            yield (
                f"the embedding has {rows} rows: a job that pads otherwise needs "
                f"--make-vocab-size-divisible-by {rows // self.layout.tensor}"
            )
        yield from self._left_out
        if not self._same_ranks:
            yield "the state of the random generators belongs to other ranks: resume with --no-load-rng"

    def _ranks(self) -> Iterator[_Rank]:
        layout = self.layout
        for tensor, pipeline, expert in product(range(layout.tensor), range(layout.pipeline), range(layout.expert)):
            yield _Rank(tensor, pipeline, expert)

    @cached_property
    def _models(self) -> LocalModels:
        """The local parameters of the target's ranks."""
        weights = {}
        for name in self._checkpoint.weights.names():
            tensor = self._tensor(WEIGHT, name)
            ranks = self.layout.expert_tensor if of_experts(name) else self.layout.tensor
            weights[name] = StoredWeight(tensor, shard_grid(name, tensor.shape, ranks, self._arguments, self._version))
        models = LocalModels(weights, self._arguments, self.layout, experts_apart=self.layout.expert > 1)
        if models.chunks is None:
            raise UnsupportedCheckpointError(
                "it is not known which layers each pipeline rank of that layout has",
                found=f"{self._arguments.num_layers} layers, {self.layout}",
                helps="choose a pipeline size, and virtual stages, that divide the layers evenly",
            )
        return models

    def _tensor(self, kind: str, name: str) -> LogicalTensor:
        """A tensor as the target has it: the vocabulary padded for its tensor-parallel size."""
        tensor = self._checkpoint.logical_tensor(kind, name)
        if tensor is None:
            raise UnsupportedCheckpointError("the checkpoint lacks a tensor that it names", where=f"{kind} {name}")
        if name in _VOCABULARY:
            return replace(tensor, shape=(self._arguments.whole("padded_vocab_size"), *tensor.shape[1:]))
        return tensor

    def _state(self, rank: _Rank) -> dict[str, Any]:
        """What `generate_state_dict` puts together."""
        source = self._checkpoint
        state = dict(self._common)
        chunks = [self._chunk(rank, stage) for stage in range(self.layout.virtual_pipeline)]
        if len(chunks) == 1:
            state["model"] = chunks[0]
        else:
            state |= {f"model{number}": chunk for number, chunk in enumerate(chunks)}
        if self._whole is not None:
            stages = range(self.layout.virtual_pipeline)
            parameters = [name for stage in stages for name in self._registered(rank, stage)]
            state["optimizer"] = self._whole.of_rank(parameters, lambda kind, name: self._part(name, rank, kind))
        elif source.optimizer_format is not None:
            children = [self._settings(rank, child) for child in range(self._children)]
            state["optimizer"] = children if len(children) > 1 else children[0]
        if self._same_ranks:
            state["rng_state"] = self._random_states[rank.pipeline, rank.tensor]
        return state

    @cached_property
    def _common(self) -> dict[str, Any]:
        left = (*_NOT_CARRIED, "args")
        common = {key: value for key, value in self._checkpoint.common.items() if key not in left}
        state = writable_state(common, self._left_out)
        state["args"] = portable_arguments(
            argparse.Namespace(**self._arguments.stated), self._version, self._left_out
        )
        return state

    def _chunk(self, rank: _Rank, stage: int) -> OrderedDict[str, Any]:
        """The `state_dict` of one model chunk, parameters in the order of registration."""
        models, last = self._models, self._is_last(rank, stage)
        parameters = self._registered(rank, stage)
        first_layer = self._first_layer(rank, stage)
        chunk: OrderedDict[str, Any] = OrderedDict()
        for name in [*parameters, *self._buffers_of(rank, stage)]:
            local = self._names.local(name, first_layer, self._first_expert(rank), last and models.has_tied_copy)
            chunk[local] = self._part(name, rank)
        for name in self._extra_states(rank, stage):
            chunk[self._names.local(name, first_layer, self._first_expert(rank), False)] = self._states[name]
        if last:
            chunk.setdefault(f"output_layer.{EXTRA_STATE}", None)  # the output layer is a ColumnParallelLinear
        return chunk

    def _registered(self, rank: _Rank, stage: int) -> list[str]:
        """The parameters of one model chunk, in the order of registration."""
        models, last = self._models, self._is_last(rank, stage)
        names = [name for name in (models.chunks or [])[rank.pipeline][stage] if self._holds(rank, name)]
        parameters = registration_order(names, self._order, tied_copy=last and models.has_tied_copy)
        if parameters is not None:
            return parameters
        if self._checkpoint.optimizer_format is None:
            return names  # the weights alone are loaded by name
        raise UnsupportedCheckpointError(
            "the order in which the model registers its parameters is not known", where=f"{rank}",
            helps="convert --to torch_dist, which needs no order",
        )  # fmt: skip

    def _part(self, name: str, rank: _Rank, kind: str = WEIGHT) -> DeclaredTensor:
        """A rank's part of a weight, or of its state."""
        if name in self._models.weights:
            tensor = self._models.weights[name].tensor
            regions = self._regions(name, self._tensor_rank(name, rank))
        else:
            tensor = self._tensor(WEIGHT, name)
            regions = (Region.whole(name, tensor.shape),)
        shape = list(tensor.shape)
        for axis, size in enumerate(regions[0].sizes):
            # Two bands of a gated projection lie one after the other.
            shape[axis] = sum(region.sizes[axis] for region in regions) if axis == 0 else size
        if kind != WEIGHT:
            tensor = replace(tensor, dtype="float32")
        wanted = self._wanted(kind, Slice.whole(regions), tensor)
        return DeclaredTensor(getattr(torch, tensor.dtype), tuple(shape), (Placed(0, wanted),))

    def _wanted(self, kind: str, part: Slice, tensor: LogicalTensor) -> WantedSlice:
        return WantedSlice(kind, part, {tensor.name: tensor}, may_pad=tensor.name in _VOCABULARY)

    def _regions(self, name: str, tensor_rank: int) -> tuple[Region, ...]:
        regions = self._models.regions(name, tensor_rank)
        if regions is None:
            raise UnsupportedCheckpointError("it is not known how tensor parallelism cuts a parameter", where=name)
        return regions

    def _tensor_rank(self, name: str, rank: _Rank) -> int:
        return rank.tensor % (self.layout.expert_tensor if of_experts(name) else self.layout.tensor)

    def _holds(self, rank: _Rank, name: str) -> bool:
        owners = {owner.expert for owner in self._models.ranks_of(name)}
        return owners <= {None, rank.expert}

    def _first_layer(self, rank: _Rank, stage: int) -> int:
        """Global number of a chunk's first decoder layer."""
        layers = self._models.layers_by_chunk
        return layers[rank.pipeline][stage].start if layers else 0

    def _first_expert(self, rank: _Rank) -> int:
        return rank.expert * ((self._arguments.num_experts or 0) // self.layout.expert)

    def _is_last(self, rank: _Rank, stage: int) -> bool:
        return (rank.pipeline, stage) == (self.layout.pipeline - 1, self.layout.virtual_pipeline - 1)

    def _buffers_of(self, rank: _Rank, stage: int) -> list[str]:
        """What is stored with the model and is no parameter: biases of the experts' router, for example."""
        span = self._models.layers_by_chunk[rank.pipeline][stage] if self._models.layers_by_chunk else range(0)
        others = [name for name in self._checkpoint.weights.names() if name not in self._models.weights]
        return [name for name in others if (parse(name).layer or 0) in span]

    @cached_property
    def _states(self) -> Mapping[str, Any]:
        return writable_extra_states(self._checkpoint, self._left_out)

    def _extra_states(self, rank: _Rank, stage: int) -> list[str]:
        span = self._models.layers_by_chunk[rank.pipeline][stage] if self._models.layers_by_chunk else range(0)
        first, count = self._first_expert(rank), (self._arguments.num_experts or 0) // self.layout.expert
        found = []
        for name in self._states:
            layer, expert = parse(name).layer, parse(name).expert
            here = layer in span if layer is not None else self._is_last(rank, stage)
            if here and (expert is None or first <= expert < first + count):
                found.append(name)
        return found

    @cached_property
    def _random_states(self) -> Mapping[tuple[int, ...], Any]:
        return writable_random_states(self._checkpoint, self._left_out)

    @property
    def _same_ranks(self) -> bool:
        """Whether every target rank is a rank of the source, which has its random state."""
        layout, source = self.layout, self._checkpoint.layout
        expected = set(product(range(layout.pipeline), range(layout.tensor)))
        same = (layout.tensor, layout.pipeline) == (source.tensor, source.pipeline)
        return same and set(self._random_states) == expected

    @cached_property
    def _whole(self) -> WholeStates | None:
        """What is written of optimizers that are not distributed; None where there is none."""
        apart = self.layout.expert > 1
        chain = portable_chain(self._checkpoint.chain() if self._checkpoint.optimizer_format else [], apart)
        if any("param_state_sharding_type" in child for child in chain):
            raise UnsupportedCheckpointError(
                "a chain of distributed and other optimizers is not written to legacy files",
                helps="convert --to torch_dist",
            )
        return WholeStates(self._checkpoint, chain, apart) if chain else None

    @property
    def _children(self) -> int:
        return 2 if self.layout.expert > 1 else 1

    def _settings(self, rank: _Rank, child: int) -> dict[str, Any]:
        """The param groups and the scaler of one chained optimizer."""
        groups = distinct_groups(self._checkpoint.param_groups(), self.layout.expert > 1)[child]
        if self._version < (0, 14):
            groups = self._by_first_use(groups, rank, child)
        settings: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        scaler = self._checkpoint.grad_scaler()
        return settings if scaler is None else {**settings, "grad_scaler": scaler}

    def _by_first_use(self, groups: Sequence[dict[str, Any]], rank: _Rank, child: int) -> list[dict[str, Any]]:
        """The groups in the order of their first parameter on this rank, which 0.13 and older load by position.

        Biases and arrays of one axis have no weight decay (`_get_param_groups`, megatron/core/optimizer/__init__.py).
        """
        multipliers = [group.get("wd_mult", group.get("pre_wd_mult")) for group in groups]
        if sorted(multipliers, key=repr) not in ([0.0, 1.0], [1.0], [0.0]):
            raise UnsupportedCheckpointError(
                "the order of these parameter groups in a legacy file is not known",
                found=f"{len(groups)} groups",
                expected="one with and one without weight decay",
                helps="write for --megatron-version 0.14 or later",
            )
        used: list[float] = []
        for buffer in self._packed(rank, child, range(self.layout.virtual_pipeline)):
            for name in buffer.names:
                plain = name.endswith(".bias") or len(self._models.weights[name].tensor.shape) == 1
                used.append(0.0 if plain else 1.0)
        order = list(dict.fromkeys(used))
        found = dict(zip(multipliers, groups, strict=True))
        return [found[value] for value in order if value in found]

    def _optimizers(self, rank: _Rank) -> list[dict[Any, Any] | None]:
        """The flat buffers of each chained optimizer; the dense one's lie beside the first expert rank."""
        if self._checkpoint.optimizer_format is None or self._whole is not None:
            return [None]
        found: list[dict[Any, Any] | None] = []
        for child in range(self._children):
            elsewhere = child == 0 and rank.expert > 0
            found.append(None if elsewhere else self._buffer_states(rank, child))
        return found

    def _packed(self, rank: _Rank, child: int, stages: Sequence[int]) -> list[PackedBuffer]:
        experts = child == 1
        tensor = rank.tensor % self.layout.expert_tensor if experts else rank.tensor
        place = ModelRank(rank.pipeline, tensor, rank.expert if experts else None)
        packed = packed_buffers(self._models, self._order, self._rule, place, stages)
        if packed is None:
            raise UnsupportedCheckpointError("it is not known how that layout packs its buffers", where=str(place))
        return packed

    def _buffer_states(self, rank: _Rank, child: int) -> dict[Any, Any]:
        """`get_parameter_state_dp_zero`: for each buffer, its buckets without the padding at their ends."""
        state: dict[Any, Any] = {"buckets_coalesced": True}
        stages = range(self.layout.virtual_pipeline)
        # Numbered through all chunks of the optimizer; a chunk without experts has no buffer of them.
        for number, buffer in enumerate(self._packed(rank, child, stages)):
            numel = sum(bucket.numel_unpadded for bucket in buffer.buckets)
            arrays: dict[str, Any] = {
                _STATE_NAMES.get(kind, kind): DeclaredTensor(torch.float32, (numel,), self._content(buffer, kind))
                for kind in self._checkpoint.optimizer.carried_kinds
            }
            state[number] = {_dtypes(buffer): {**arrays, "numel_unpadded": numel}}
        return state

    def _content(self, buffer: PackedBuffer, kind: str) -> tuple[Placed, ...]:
        placed = []
        for origin, bucket in zip(buffer.joined_origins(), buffer.buckets, strict=True):
            for index, start, _ in bucket.placements:
                name, regions = buffer.names[index], buffer.regions[index]
                tensor = replace(self._models.weights[name].tensor, dtype="float32")
                placed.append(Placed(origin + start, self._wanted(kind, Slice.whole(regions), tensor)))
        return tuple(sorted(placed, key=lambda part: part.start))

    @property
    def _rule(self) -> PackingRule:
        return PackingRule.SINCE_0_13 if self._version >= (0, 13) else PackingRule.UNTIL_0_12

    @cached_property
    def _order(self) -> ParameterOrder:
        return order_for(self._checkpoint, self._arguments, self.layout.expert > 1)


def _dtypes(buffer: PackedBuffer) -> tuple[torch.dtype, ...]:
    """The (parameter, gradient) dtypes that Megatron files a buffer under."""
    return tuple(getattr(torch, name.strip().removeprefix("torch.")) for name in buffer.dtypes.strip("()").split(","))
