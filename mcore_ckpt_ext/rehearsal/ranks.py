"""The ranks of a simulated job: their parts in the optimizers, derived from the job's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from typing_extensions import override

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.job_models import JobModels
from mcore_ckpt_ext.layout.local_model import LocalModels, ModelRank
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.parameter_order import known_orders, registration_order
from mcore_ckpt_ext.megatron.live.job import RankSummary
from mcore_ckpt_ext.megatron.live.model import LiveParameter
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import Shard
from mcore_ckpt_ext.model_space.anatomy import is_in_vocabulary
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT, LogicalTensor
from mcore_ckpt_ext.operations.coverage import lost_parameters
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.plan import TargetSlice, named_tensor
from mcore_ckpt_ext.transfer import read_wanted
from mcore_ckpt_ext.versions import Version

_HALVES = ("bfloat16", "float16")
_KIND = "whole masters"


@dataclass(frozen=True, eq=False)
class SimulatedShard(Shard):
    """A simulated rank's shard of one parameter in its optimizer; the weight is the checkpoint's."""

    checkpoint: CheckpointView

    @property
    @override
    def weight(self) -> torch.Tensor:
        """Read the elements of the weight, which the job would have loaded before its master check."""
        target = TargetSlice(WEIGHT, self.slice, self.live.tensors, self.live.may_pad)
        return read_wanted(self.checkpoint, self.checkpoint.files.transfer, target, False)

    def part(self, start: int, stop: int) -> SimulatedShard:
        """Return a part of the shard; positions count elements of the whole parameter."""
        return replace(self, slice=Slice(self.slice.regions, start, stop))


@dataclass(frozen=True)
class Held:
    """A part of a parameter on some ranks, before it is divided within their data-parallel group.

    Attributes:
        shard: all elements of the part.
        places: the ranks' places in the model.
    """

    shard: SimulatedShard
    places: tuple[ModelRank, ...]


class SimulatedJob:
    """All ranks of a job that would resume a checkpoint, with the checkpoint's own model."""

    def __init__(self, checkpoint: CheckpointView, arguments: JobArguments, version: Version) -> None:
        """Raise UnsupportedCheckpointError if the job's distribution of the model is unknown."""
        self.arguments = arguments
        self.layout = ParallelLayout.from_arguments(arguments)
        self._held: dict[int, list[Held]] = {}
        self._checkpoint = checkpoint
        self._version = (version.major, version.minor)
        tensors = {name: self._live_tensor(name) for name in checkpoint.names(WEIGHT)}
        self._tensors = tensors
        self.models = JobModels(tensors, arguments, self.layout, self._version)
        if self.models.weight_shards > 1:
            raise UnsupportedCheckpointError(
                "a rehearsal does not support generalized tensor parallelism",
                found=quantity(self.models.weight_shards, "weight shard"),
                hint="try the job itself: this cannot be rehearsed",
            )

    @cached_property
    def view(self) -> RankSummary:
        """A summary of the model on all ranks, except trained parameters."""
        return RankSummary(list(self._tensors), [], self._registration_order(), frozenset({_KIND}))

    def _registration_order(self) -> list[list[str]]:
        """Return the parameters of every chunk in the registration order of the layer spec in the arguments.

        Returns:
            Empty if that order is unknown.
        """
        order = known_orders(self.arguments)[0].order_of_version(self._version)
        orders = []
        for pipeline, chunks in enumerate(self.models.chunks or []):
            for stage, chunk in enumerate(chunks):
                tied = (pipeline, stage) == self.layout.last_chunk and self.models.has_tied_copy
                orders.append(registration_order(chunk, order, tied_copy=tied))
        complete = [names for names in orders if names is not None]
        return complete if len(complete) == len(orders) else []

    @cached_property
    def trained(self) -> set[str]:
        """The parameters with optimizer state; others are assumed to be frozen in the job, too.

        Those of a rank that has stored nothing were not frozen: their state is lost.
        """
        lost = (
            name for buffers in self._state.buffers for names in lost_parameters(buffers).values() for name in names
        )
        return {*self._state.names(), *lost} & self.models.weights.keys()

    @cached_property
    def frozen(self) -> list[str]:
        """The parameters without optimizer state."""
        return [name for name in self.models.weights if name not in self.trained]

    @cached_property
    def trained_models(self) -> LocalModels:
        """The same ranks without frozen parameters, which gradient buffers do not contain."""
        return self.models.without(self.frozen)

    def parts_of_stage(self, pipeline: int) -> list[Held]:
        """Return the parts on the ranks of one pipeline stage, each part once."""
        if pipeline not in self._held:
            self._held[pipeline] = [
                Held(self._shard(name, regions), tuple(places))
                for (name, regions), places in self._parts(pipeline).items()
                if name in self.trained
            ]
        return self._held[pipeline]

    def weights(self, pipeline: int) -> list[tuple[TargetSlice, int]]:
        """Return the weights and buffers that a pipeline stage loads, each once with the number of ranks.

        A second name of a tied tensor denotes the same tensor.
        """
        parts = self._parts(pipeline).items()
        weights = [(self._target(regions), sum(map(self.copies, places))) for (_, regions), places in parts]
        ranks = self.layout.world // self.layout.pipeline
        others = [name for name in self._tensors if name not in self.models.weights]
        here = [name for name in others if (self.models.chunk_of(name) or (0,))[0] == pipeline]
        return weights + [(self._target((Region.whole(name, self._tensors[name].shape),)), ranks) for name in here]

    def copies(self, place: ModelRank) -> int:
        """Return the number of data-parallel ranks of a place."""
        return self.layout.data * self.layout.context if place.expert is None else self.layout.expert_data

    def _parts(self, pipeline: int) -> dict[tuple[str, tuple[Region, ...]], list[ModelRank]]:
        parts: dict[tuple[str, tuple[Region, ...]], list[ModelRank]] = {}
        for place in self._places(pipeline):
            for chunk in self.models.names(place) or []:
                for name in chunk:
                    parts.setdefault((name, self.models.part_of(name, place.tensor)), []).append(place)
        return parts

    def _places(self, pipeline: int) -> Iterator[ModelRank]:
        for tensor in range(self.layout.tensor):
            yield ModelRank(pipeline, tensor)
        if self.models.has_expert_optimizer:
            for expert in range(self.layout.expert):
                for tensor in range(self.layout.expert_tensor):
                    yield ModelRank(pipeline, tensor, expert)

    def _live_tensor(self, name: str) -> LogicalTensor:
        """Return a weight with the job's dtype and rows of the vocabulary."""
        tensor = named_tensor(self._checkpoint, WEIGHT, name)
        job = self.arguments
        tensor = replace(tensor, dtype=dtype_of(tensor.dtype, job))
        rows = job.padded_vocab_size
        if is_in_vocabulary(name) and rows is not None:
            tensor = replace(tensor, shape=(rows, *tensor.shape[1:]))
        return tensor

    def _target(self, regions: tuple[Region, ...]) -> TargetSlice:
        tensors = {region.name: self._tensors[region.name] for region in regions}
        return TargetSlice(WEIGHT, Slice.whole(regions), tensors, may_pad=is_in_vocabulary(regions[0].name))

    def _shard(self, name: str, regions: tuple[Region, ...]) -> SimulatedShard:
        target = self._target(regions)
        parameter = _parameter_of(self._tensors[name].dtype)
        live = LiveParameter(parameter, regions, target.tensors, target.may_pad)
        return SimulatedShard(live, target.slice, self._kinds(name), self._checkpoint)

    @cached_property
    def _state(self) -> OptimizerState:
        return self._checkpoint.optimizer.state()

    def _kinds(self, name: str) -> tuple[str, ...]:
        """Return the kinds of a parameter's optimizer state, which are the checkpoint's."""
        state = self._state
        kinds = (kind for kind in state.carried_kinds if state.logical_tensor(kind, name) is not None)
        return tuple(kind for kind in kinds if kind != FP32_PARAM)


def dtype_of(stored: str, running: JobArguments) -> str:
    """Return the dtype that a weight stored in `stored` has in a job; weights stored in fp32 keep fp32."""
    if stored not in _HALVES:
        return stored
    return "bfloat16" if running.bf16 else "float16" if running.fp16 else "float32"


@cache
def _parameter_of(dtype: str) -> torch.Tensor:
    """A tensor without memory that represents all live parameters of a dtype."""
    return torch.empty(0, dtype=getattr(torch, dtype), device="meta")
