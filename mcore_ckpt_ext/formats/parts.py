"""The parts of an open checkpoint, each of which can be replaced separately (`view.py`).

Fields are functions, so that nothing is read before it is needed. A provider of an expensive value caches it. The
default of a field is its value for a format that does not record it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.description import stored_arguments
from mcore_ckpt_ext.formats.evidence import Bound
from mcore_ckpt_ext.formats.sidecar_file import FoundSidecar
from mcore_ckpt_ext.formats.stored_parts import StoredParts
from mcore_ckpt_ext.formats.unread_state import UnreadState
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.master_check import MasterCheck, master_check_of
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder, known_orders
from mcore_ckpt_ext.model_space.names import ShardedKey
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.array_location import RawArray
from mcore_ckpt_ext.planning.plan import Copies, Source, derivation_of
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.transfer import Transfer

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.recognition import Fit

Value = TypeVar("Value")


def lazy(compute: Callable[[], Value]) -> Callable[[], Value]:
    """Return a function that computes its value on the first call and caches it."""
    return cache(compute)


class Weights(Source, Protocol):
    """The model's arrays, in model space."""

    def names(self) -> list[str]:
        """Return all names."""

    def copies(self, kind: str, name: str) -> Copies:
        """Return the parts of a tensor, and the copies of each part."""


class UnreadKeys(Protocol):
    """A function that returns stored keys that this package ignores."""

    def __call__(self, *, objects: bool = True) -> list[UnreadState]:
        """Return them; with `objects`, also those in small pickled objects."""


@dataclass(frozen=True)
class Files:
    """The stored bytes.

    Attributes:
        folder: the `iter_XXXXXXX` or `release` folder.
        reader: reads its files.
        transfer: reads tensors from them.
        stored_parts: the stored parts of every array and object, from metadata alone.
        auxiliary_files: small files that belong to the model, such as its tokenizer, by name.
        auxiliary_files_below: the subfolder of the checkpoint that contains them; empty for the checkpoint itself.
        archives: all torch archives as (file, offset, length).
        raw_arrays: all arrays that are stored as bare elements, each with its checksum if it has one.
        unread: returns stored keys that this package ignores.
        index: the arrays and objects by Megatron's keys; None if the format has no index.
        stored_index: the index by its stored keys; None if the format has none.
        rank_of: returns the model-parallel rank (tensor, pipeline, expert) that wrote a file; None if it is unknown.
    """

    folder: Path
    reader: FolderReader
    transfer: Transfer
    stored_parts: Callable[[], Iterator[StoredParts]]
    auxiliary_files: Callable[[], dict[str, bytes]]
    auxiliary_files_below: str
    archives: Callable[[], Iterator[tuple[str, int, int]]] = lambda: iter(())
    raw_arrays: Callable[[], Iterator[RawArray]] = lambda: iter(())
    unread: UnreadKeys = lambda *, objects=True: []
    index: Callable[[], DcpIndex | None] = lambda: None
    stored_index: Callable[[], DcpIndex | None] = lambda: None
    rank_of: Callable[[str], tuple[int, int, int] | None] = lambda file: None


@dataclass(frozen=True)
class StoredWeights:
    """The model.

    Attributes:
        weights: its arrays.
        sharded_keys: the `torch_dist` array of each name, and its index on the axes of layers and experts.
        fit: the model's family and arguments if the format itself determines them, else None.
        other_layer_spec: another layer spec whose names it can be opened with; None if its names are fixed.
        has_norms_of_all_heads: whether query and key norms extend over all heads, which Megatron Core does not support.
        mismatch_with: checks by metadata that the weights belong to an optimizer whose job had the given arguments;
            returns the error to raise, or None if nothing contradicts it.
    """

    weights: Callable[[], Weights]
    sharded_keys: Callable[[], Mapping[str, ShardedKey]]
    fit: Callable[[], Fit | None] = lambda: None
    other_layer_spec: str | None = None
    has_norms_of_all_heads: bool = False
    mismatch_with: Callable[[JobArguments], CheckpointError | None] = lambda job: None


@dataclass(frozen=True)
class StoredOptimizer:
    """The optimizer, or several chained ones.

    Attributes:
        state: its arrays; raises `UnsupportedCheckpointError` if the format is not supported.
        format: the name of the optimizer format, Megatron's where it has one; None without an optimizer.
        has_expert_optimizer: whether experts have an optimizer of their own.
        param_groups: the parameter groups as each rank group stored them, with repetitions.
        chained_optimizer_settings: the settings of each chained optimizer, as the common state of `torch_dist` has
            them: its groups without parameters, with the step added if no group has it; empty if all of them are or can
            become DistributedOptimizers, which need no settings.
        grad_scaler: the state of the gradient scaler (fp16 only).
        weights_derived_from_masters: whether only masters are stored, so that weights are rounded masters.
        shows_registration: whether its buffers have the parameter order of a job with the view's arguments.
    """

    state: Callable[[], OptimizerState]
    format: Callable[[], str | None] = lambda: None
    has_expert_optimizer: Callable[[], bool] = lambda: False
    param_groups: Callable[[], list[dict[str, Any]]] = list
    chained_optimizer_settings: Callable[[], list[dict[str, Any]]] = list
    grad_scaler: Callable[[], dict[str, Any] | None] = lambda: None
    weights_derived_from_masters: bool = False
    shows_registration: bool = True

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of its arrays; none without an optimizer."""
        return self.state().kinds if self.format() else ()

    def carried_kinds(self) -> tuple[str, ...]:
        """Return the kinds from which, with the weights, all others can be derived."""
        return self.state().carried_kinds if self.format() else ()

    def masters_are_derived(self, name: str) -> bool:
        """Return whether a parameter's masters and weights derive from each other and need no verification."""
        return self.weights_derived_from_masters or derivation_of(self.state(), FP32_PARAM, name) is not None


@dataclass(frozen=True)
class Job:
    """The job that wrote the checkpoint.

    Attributes:
        common: the common state: arguments, iteration, scheduler and the like.
        arguments: the known arguments; raises `UnreadableCheckpointError` if one has an invalid value.
        iteration: the training iteration; the number in the folder's name if the checkpoint does not record one.
        is_release: whether it is a model to start from, not an iteration of a job (Megatron's `release` folder).
        models: the local parameters of its ranks, under the names of the format's reader.
        observed_orders: evidence of the order in which parameters were registered.
        found_sidecar: the packing recorded in the sidecar, and why an existing sidecar is not used.
        vocabulary: the number of tokens without padding; None if the format does not record it.
        layers: global decoder layers by `[pipeline rank][virtual stage]`, if the format shows them.
        unbuildable: returns why a version of Megatron cannot build this model; None if it can.
        evidence: evidence of the Megatron release that wrote the checkpoint, other than the arguments.
        described_by: the name of the file that describes the job; empty if there is none.
        problems: values of job descriptions that are ignored, and why.
    """

    common: Callable[[], dict[str, Any]]
    arguments: Callable[[], JobArguments]
    iteration: Callable[[], int]
    is_release: bool
    models: Callable[[], LocalModels]
    observed_orders: Callable[[], Sequence[ParameterOrder]]
    found_sidecar: Callable[[], FoundSidecar]
    vocabulary: Callable[[], int | None] = lambda: None
    layers: Callable[[], list[list[range]] | None] = lambda: None
    unbuildable: Callable[[tuple[int, int]], str | None] = lambda version: None
    evidence: Callable[[], Iterator[Bound]] = lambda: iter(())
    described_by: Callable[[], str] = str
    problems: Callable[[], Sequence[str]] = tuple

    @property
    def args(self) -> dict[str, Any]:
        """Megatron's parsed arguments, by name; dtypes as `Dtype`."""
        return stored_arguments(self.common())

    @cached_property
    def layout(self) -> ParallelLayout:
        """The parallel layout."""
        return ParallelLayout.from_arguments(self.arguments())

    @property
    def tokens(self) -> int | None:
        """Tokens of the vocabulary without padding, by the format or the arguments; None if neither has them."""
        recorded = self.vocabulary()
        return self.arguments().tokens if recorded is None else recorded

    @cached_property
    def master_check(self) -> MasterCheck:
        """The master check for the masters that the checkpoint stores."""
        return master_check_of(self.arguments())

    def orders(self) -> list[ParameterOrder]:
        """Return possible registration orders of the parameters, the observed ones first."""
        return [*self.observed_orders(), *known_orders(self.arguments())]


@dataclass(frozen=True)
class States:
    """State that belongs neither to the model's tensors nor to the optimizer.

    Attributes:
        extra: the modules' extra states (fp8 scales; empty in other precisions), by model-space name.
        random: the state of the random generators by rank: (pipeline, tensor[, data]).
        random_grid: the grid of ranks if that state is stored as one array, else None.
    """

    extra: Callable[[], Mapping[str, Any]] = dict
    random: Callable[[], Mapping[tuple[int, ...], Any]] = dict
    random_grid: Callable[[], tuple[int, ...] | None] = lambda: None


@dataclass(frozen=True)
class WholeModel:
    """The text part of a vision-language model, under the names of the text model.

    Attributes:
        kind: the `model_type` of the whole model.
        text: the names of the text part's weights.
    """

    kind: str
    text: frozenset[str]
