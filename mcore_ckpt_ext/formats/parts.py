"""The parts of an open checkpoint, each of which can be replaced by itself (`view.py`).

Fields are functions, so that nothing is read until it is needed; what is expensive is computed once by whoever
provides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mcore_ckpt_ext.formats.sidecar_file import FoundSidecar
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.model_space.names import ShardedKey
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.array_location import RawArray
from mcore_ckpt_ext.planning.plan import Copies, Source
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.transfer import Transfer

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.view import CheckpointView

Value = TypeVar("Value")


def lazy(compute: Callable[[], Value]) -> Callable[[], Value]:
    """A function that computes its value when it is first called, and keeps it."""
    return cache(compute)


class Weights(Source, Protocol):
    """The model's arrays, in model space."""

    def names(self) -> list[str]:
        """All names."""

    def copies(self, kind: str, name: str) -> Copies:
        """The parts of a tensor, and the copies of each part."""


@dataclass(frozen=True)
class Files:
    """Where the bytes lie.

    Attributes:
        folder: the iteration folder.
        reader: reads its files.
        transfer: reads tensors from them.
        archives: every archive: (file, offset, length).
        checked_arrays: every array that lies bare in a file and whose checksum is known.
        auxiliary_files: small files that belong to the model, such as its tokenizer, by name.
        auxiliary_files_below: the folder within the checkpoint that holds them; empty for the checkpoint itself.
    """

    folder: Path
    reader: FolderReader
    transfer: Transfer
    archives: Callable[[], Iterator[tuple[str, int, int]]]
    checked_arrays: Callable[[], Iterator[RawArray]]
    auxiliary_files: Callable[[], dict[str, bytes]]
    auxiliary_files_below: str


@dataclass(frozen=True)
class StoredWeights:
    """The model.

    Attributes:
        source: its arrays.
        sharded_keys: the array of each name in `torch_dist`, and its index on the axes that count layers and experts.
    """

    source: Callable[[], Weights]
    sharded_keys: Callable[[], Mapping[str, ShardedKey]]


@dataclass(frozen=True)
class StoredOptimizer:
    """The optimizer, or several chained ones.

    Attributes:
        format: the name of its encoding, Megatron's own where it has one; None without an optimizer.
        state: its arrays.
        has_expert_optimizer: whether experts have an optimizer of their own.
        param_groups: the parameter groups as each rank group stored them, with repetitions.
        chain: the settings of each chained optimizer, see `Checkpoint.chain`.
        grad_scaler: the state of the gradient scaler (fp16 only).
        weights_derived_from_masters: whether masters alone are stored, and the weights are their roundings.
        shows_registration: whether its buffers hold the parameters as a job with the view's arguments registers them.
    """

    format: Callable[[], str | None]
    state: Callable[[], OptimizerState]
    has_expert_optimizer: Callable[[], bool]
    param_groups: Callable[[], list[dict[str, Any]]]
    chain: Callable[[], list[dict[str, Any]]]
    grad_scaler: Callable[[], dict[str, Any] | None]
    weights_derived_from_masters: bool
    shows_registration: bool = True


@dataclass(frozen=True)
class Job:
    """The job that wrote the checkpoint.

    Attributes:
        common: the common state: arguments, iteration, scheduler and the like.
        arguments: what is known of its arguments.
        iteration: the training iteration.
        released: whether it is a model to start from, not an iteration of a job (Megatron's `release` folder).
        vocabulary: tokens without padding, where the format itself gives their number.
        layers: global decoder layers by `[pipeline rank][virtual stage]`, where the format itself shows them.
        orders: evidence of the order in which parameters were registered.
        sidecar: the packing recorded beside the checkpoint, and why one that is there is not used.
        unbuildable: why a version of Megatron has no such model; None where it has.
    """

    common: Callable[[], dict[str, Any]]
    arguments: Callable[[], JobArguments]
    iteration: Callable[[], int]
    released: bool
    vocabulary: Callable[[], int | None]
    layers: Callable[[], list[list[range]] | None]
    orders: Callable[[], Sequence[ParameterOrder]]
    sidecar: Callable[[], FoundSidecar]
    unbuildable: Callable[[tuple[int, int]], str | None]


@dataclass(frozen=True)
class States:
    """What is no tensor of the model and no state of the optimizer.

    Attributes:
        extra: the modules' extra states (fp8 scales; nothing in other precisions), by model-space name.
        random: the state of the random generators by rank: (pipeline, tensor[, data]).
        random_grid: ranks for which that is stored as one array; None where it is not.
    """

    extra: Callable[[], Mapping[str, Any]]
    random: Callable[[], Mapping[tuple[int, ...], Any]]
    random_grid: Callable[[], tuple[int, ...] | None]


@dataclass(frozen=True)
class Adapters:
    """Properties of a checkpoint that contains only adapters.

    Attributes:
        model: the checkpoint that describes their model; None where they do so themselves.
        by_rank: rows of both projections of a gated `linear_fc1` lie rank by rank, as ms-swift stores them.
    """

    model: CheckpointView | None = None
    by_rank: bool = False


@dataclass(frozen=True)
class WholeModel:
    """The text part of a vision-language model, under the names of the text model.

    Attributes:
        kind: the `model_type` of the whole.
        text: the names of its text.
    """

    kind: str
    text: frozenset[str]


@dataclass(frozen=True)
class Merger:
    """Where a model with merged adapters comes from.

    Attributes:
        sources: the base and the adapters; one where they lie beside each other.
        messages: what a user of the merged model should know.
    """

    sources: Sequence[CheckpointView]
    messages: Sequence[str]
