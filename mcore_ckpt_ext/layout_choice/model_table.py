"""A model as a table of parameters, to count the elements on each pipeline stage of a layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod

import numpy as np

from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.grad_buffer import PARAMETER_ALIGNMENT
from mcore_ckpt_ext.layout.local_parameters import Cut
from mcore_ckpt_ext.layout_choice.local_columns import AFTER_LAYERS, BEFORE_LAYERS, Flags, LocalColumns, Numbers
from mcore_ckpt_ext.layout_choice.padded_rows import PaddedRows

NO_EXPERTS = -1
ALL_PARAMETERS = 0
"""In the place of an expert parallel size: the parameters outside experts, or all, where no rank divides experts."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """The properties of one parameter of the model that a plan needs.

    Attributes:
        name: its name in model space.
        shape: the shape of the whole tensor; for a table of tokens without rows of padding, if their number is known.
        weight_bytes: bytes of one element of the weight.
        place: the decoder layer's number; `BEFORE_LAYERS` (embedding) or `AFTER_LAYERS` (norms, output layer).
        cut: how tensor-parallel ranks shard it; None if it is replicated.
        expert: the number of its expert; None outside experts.
        is_vocabulary: whether it has a row for every token, padded for the tensor parallel size.
        state_bytes: bytes of one element of the optimizer's state in memory, master included.
        stored_bytes: bytes of one element of the optimizer's state in the checkpoint.
        is_distributed: whether data-parallel ranks share its state.
        is_trained: whether it has a gradient; False if it is frozen, as under low-rank adapters.
        stored_weight_bytes: bytes of one element of the weight in the checkpoint; None: as in memory.
    """

    name: str
    shape: tuple[int, ...]
    weight_bytes: int
    place: int
    cut: Cut | None
    expert: int | None = None
    is_vocabulary: bool = False
    state_bytes: int = 0
    stored_bytes: int = 0
    is_distributed: bool = True
    is_trained: bool = True
    stored_weight_bytes: int | None = None

    @property
    def read_weight_bytes(self) -> int:
        """Bytes that are read for one element of the weight."""
        return self.weight_bytes if self.stored_weight_bytes is None else self.stored_weight_bytes


@dataclass(frozen=True, slots=True)
class Holding:
    """The totals of the parameters of one kind on one rank of a stage.

    Attributes:
        elements: number of elements.
        aligned: number of elements with a gradient, each parameter padded as in a gradient buffer.
        trained: number of elements with a gradient.
        weight_bytes: bytes of the weights.
        shared_state: bytes of optimizer state that data-parallel ranks share.
        whole_state: bytes of optimizer state that every rank keeps.
        shared_stored: bytes of optimizer state in the checkpoint that data-parallel ranks share.
        whole_stored: bytes of optimizer state in the checkpoint that every rank reads.
        stored_weights: bytes of the weights in the checkpoint.
        joined_weights: bytes of trained weights that a checkpoint stores in bands, such as gate and up projection.
    """

    elements: int = 0
    aligned: int = 0
    trained: int = 0
    weight_bytes: int = 0
    shared_state: int = 0
    whole_state: int = 0
    shared_stored: int = 0
    whole_stored: int = 0
    stored_weights: int = 0
    joined_weights: int = 0

    def bytes_read(self, ranks: int, readers: int = 1) -> int:
        """Return the bytes that ranks of a stage read in a resume.

        Args:
            ranks: the data-parallel ranks that share a state.
            readers: the number of ranks that read; by default one, that with the largest share.
        """
        return readers * (self.stored_weights + self.whole_stored) + -(-readers * self.shared_stored // ranks)


@dataclass(frozen=True, slots=True)
class StageHolding:
    """The totals on a rank of a pipeline stage: `dense` parameters, `experts` with expert parallelism.

    Without expert parallelism, experts are in the same buffers as all other parameters and count as dense
    (`is_expert_parallel`, megatron/core/distributed/distributed_data_parallel.py, core_v0.7.0 to 0.19.2).
    """

    dense: Holding
    experts: Holding

    def bytes_read(self, ranks: int, expert_ranks: int, readers: int = 1) -> int:
        """Return the bytes that ranks of the stage read in a resume; see `Holding.bytes_read`."""
        return self.dense.bytes_read(ranks, readers) + self.experts.bytes_read(expert_ranks, readers)


@dataclass(frozen=True, slots=True)
class _Totals:
    """Totals as arrays, with one column for each attribute of `Holding`.

    Attributes:
        inside: totals of all layers before the one of the row's number.
        before: totals of parameters before the layers.
        after: totals of parameters after the layers.
        copied: totals of the word embeddings, which the last stage may copy.
    """

    inside: Numbers
    before: Numbers
    after: Numbers
    copied: Numbers

    def totals_of_stage(self, spans: Iterable[range], *, is_first: bool, is_last: bool, copies: int) -> Holding:
        """Return the totals of a stage with these layers, which may be the first or the last stage."""
        totals = np.zeros_like(self.before)
        for span in spans:
            totals += self.inside[span.stop] - self.inside[span.start]
        if is_first:
            totals += self.before
        if is_last:
            totals += self.after
        totals += copies * self.copied
        return Holding(*totals.tolist())


def embedding_copies(job: JobArguments) -> int:
    """Return the number of copies of the word embedding on the last of several pipeline stages.

    A tied model has one as its output layer, and multi-token prediction needs one to embed tokens
    (`GPTModel.__init__`, megatron/core/models/gpt/gpt_model.py, core_v0.12.0 to 0.19.2: an embedding where
    `pre_process or mtp_process`, an output layer without a weight where `pre_process`).
    """
    return (not job.untie_embeddings_and_output_weights) + bool(job.mtp_num_layers)


def place_after_layers(name: str, job: JobArguments) -> int:
    """Return the place of a parameter after the decoder layers, by its name within the language model.

    In models with multi-token prediction, the final norm is on the stage of the last decoder layer, even if the last
    stage has no decoder layer (`has_final_layernorm_in_this_stage`, megatron/core/transformer/transformer_block.py,
    core_v0.16.0 to 0.19.2). Before, it was always on the last stage.
    """
    is_norm = name.startswith("decoder.final_")
    return job.num_layers - 1 if is_norm and job.mtp_num_layers and job.num_layers else AFTER_LAYERS


class ModelTable:
    """All parameters of a model, with cached totals for the stages of layouts."""

    def __init__(self, parameters: Sequence[Parameter], layers: int, *, copies: int, padded_rows: PaddedRows) -> None:
        """`copies`: copies of the word embedding on a last stage other than the first (`embedding_copies`)."""
        self.parameters = tuple(parameters)
        self.layers = layers
        self.padded_rows = padded_rows
        self.copies = copies
        self._totals = cache(self._running_totals)

    @cached_property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(prod(parameter.shape) for parameter in self.parameters)

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of all weights and all optimizer state in the checkpoint, each element counted once."""
        widths = ((prod(tensor.shape), tensor.read_weight_bytes + tensor.stored_bytes) for tensor in self.parameters)
        return sum(elements * width for elements, width in widths)

    def indivisible(self, tensor: int, expert_tensor: int) -> str | None:
        """Return why a parameter cannot be divided among these numbers of ranks; None if all can.

        Source: `divide` (megatron/core/utils.py), called for every sharded axis in
        megatron/core/tensor_parallel/layers.py, core_v0.7.0 to 0.19.2.
        """
        for (size, bands, is_expert), name in self._cut_sizes.items():
            ranks = expert_tensor if is_expert else tensor
            if size % (bands * ranks):
                rows = quantity(size // bands, "row or column", "rows or columns")
                return f"{name} has {rows}, which {ranks} ranks cannot divide"
        return None

    @cached_property
    def _cut_sizes(self) -> Mapping[tuple[int, int, bool], str]:
        """The distinct sizes of sharded axes, each with the name of one parameter that has it."""
        names_by_size: dict[tuple[int, int, bool], str] = {}
        for parameter in self.parameters:
            if parameter.cut is not None and not parameter.is_vocabulary:
                key = (parameter.shape[parameter.cut.axis], parameter.cut.bands, parameter.expert is not None)
                names_by_size.setdefault(key, parameter.name)
        return names_by_size

    def stages(
        self, ranges: Sequence[Sequence[range]], tensor: int, expert_tensor: int, expert: int
    ) -> list[StageHolding]:
        """Return the totals on one rank of each pipeline stage.

        Args:
            ranges: global decoder layers by `[pipeline rank][virtual stage]`.
            tensor: tensor parallel size.
            expert_tensor: tensor parallel size of experts.
            expert: expert parallel size.
        """
        is_separate = expert > 1 or expert_tensor != tensor  # `ParallelLayout.separates_experts`
        dense = self._totals(tensor, expert_tensor, NO_EXPERTS if is_separate else ALL_PARAMETERS)
        experts = self._totals(tensor, expert_tensor, expert) if is_separate else None
        holdings = []
        for rank, spans in enumerate(ranges):
            is_first = rank == 0
            is_last = rank == len(ranges) - 1
            copies = self.copies if is_last and not is_first else 0
            held = StageHolding(
                dense.totals_of_stage(spans, is_first=is_first, is_last=is_last, copies=copies), Holding()
            )
            if experts is not None:
                held = replace(
                    held, experts=experts.totals_of_stage(spans, is_first=is_first, is_last=is_last, copies=0)
                )
            holdings.append(held)
        return holdings

    def local(self, tensor: int, expert_tensor: int, expert: int) -> LocalColumns:
        """Return one rank's part of every parameter.

        `expert`: `NO_EXPERTS`, `ALL_PARAMETERS`, or the expert parallel size, for the experts of one rank alone.
        """
        local, chosen = self._divide(tensor, expert_tensor, expert)
        return local.select(chosen)

    def _divide(self, tensor: int, expert_tensor: int, expert: int) -> tuple[LocalColumns, Flags]:
        """Return one rank's part of every parameter, and a mask of the parameters that the rank has."""
        columns = self._columns
        is_expert = columns["expert"] >= 0
        if expert == NO_EXPERTS:
            chosen = ~is_expert
        elif expert == ALL_PARAMETERS:
            chosen = np.ones_like(is_expert)
        else:
            experts = 1 + max((parameter.expert or 0 for parameter in self.parameters), default=0)
            chosen = is_expert & (columns["expert"] < experts // expert)
        ranks = np.where(is_expert, expert_tensor, tensor)
        is_vocabulary = columns["is_vocabulary"] > 0
        whole = np.where(is_vocabulary, columns["row_elements"] * self.padded_rows(tensor), columns["numel"])
        elements = np.where(columns["cut"] >= 0, whole // ranks, whole)
        is_matrix = columns["matrix_columns"] > 0
        width = np.where(columns["cut"] == 1, columns["matrix_columns"] // ranks, columns["matrix_columns"])
        local = LocalColumns(
            elements, elements // np.maximum(width, 1), width, elements * columns["state_bytes"], is_matrix,
            columns["place"], is_vocabulary & (columns["place"] == BEFORE_LAYERS),
        )  # fmt: skip
        return local, chosen

    def _running_totals(self, tensor: int, expert_tensor: int, expert: int) -> _Totals:
        """Return running totals over layers; for `expert` see `local`."""
        columns = self._columns
        local, chosen = self._divide(tensor, expert_tensor, expert)
        elements = local.elements
        aligned = -(-elements // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
        # Parameters before layer 0 and after the last layer are counted in two additional rows.
        place = np.where(columns["place"] == BEFORE_LAYERS, self.layers, columns["place"])
        place = np.where(columns["place"] == AFTER_LAYERS, self.layers + 1, place)

        def sum_by_place(values: Numbers) -> Numbers:
            counted = np.bincount(place, weights=np.where(chosen, values, 0), minlength=self.layers + 2)
            return counted.astype(np.int64)

        shared = columns["is_distributed"] > 0
        trained = columns["is_trained"]
        # In the order of the attributes of `Holding`.
        values = (
            elements,
            aligned * trained,
            elements * trained,
            elements * columns["weight_bytes"],
            np.where(shared, local.state, 0),
            np.where(shared, 0, local.state),
            np.where(shared, elements * columns["stored_bytes"], 0),
            np.where(shared, 0, elements * columns["stored_bytes"]),
            elements * columns["read_weight_bytes"],
            elements * columns["weight_bytes"] * trained * columns["has_bands"],
        )
        totals = np.stack([sum_by_place(value) for value in values], axis=1)
        start = np.zeros((1, len(values)), dtype=np.int64)
        embeddings = local.is_embedding & chosen
        return _Totals(
            inside=np.concatenate([start, np.cumsum(totals[: self.layers], axis=0)]),
            before=totals[self.layers],
            after=totals[self.layers + 1],
            copied=np.array([value[embeddings].sum() for value in values]),
        )

    @cached_property
    def _columns(self) -> dict[str, Numbers]:
        def column(values: Iterable[int]) -> Numbers:
            return np.fromiter(values, dtype=np.int64, count=len(self.parameters))

        all_of = self.parameters
        return {
            "numel": column(prod(tensor.shape) for tensor in all_of),
            "row_elements": column(prod(tensor.shape[1:]) for tensor in all_of),
            "is_vocabulary": column(tensor.is_vocabulary for tensor in all_of),
            "cut": column(-1 if tensor.cut is None else tensor.cut.axis for tensor in all_of),
            "matrix_columns": column(
                tensor.shape[1] if len(tensor.shape) == 2 and not tensor.is_vocabulary else 0 for tensor in all_of
            ),
            "has_bands": column(tensor.cut is not None and tensor.cut.bands > 1 for tensor in all_of),
            "expert": column(-1 if tensor.expert is None else tensor.expert for tensor in all_of),
            "place": column(tensor.place for tensor in all_of),
            "weight_bytes": column(tensor.weight_bytes for tensor in all_of),
            "state_bytes": column(tensor.state_bytes for tensor in all_of),
            "stored_bytes": column(tensor.stored_bytes for tensor in all_of),
            "is_distributed": column(tensor.is_distributed for tensor in all_of),
            "is_trained": column(tensor.is_trained for tensor in all_of),
            "read_weight_bytes": column(tensor.read_weight_bytes for tensor in all_of),
        }
