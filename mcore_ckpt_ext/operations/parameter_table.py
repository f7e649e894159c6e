"""The parameters of a checkpoint's model for the choice of a layout: shapes, places, bytes of state."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.vocabulary import vocabulary_rows
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.local_parameters import Cut, newest_cuts
from mcore_ckpt_ext.layout.master_check import has_fused_masters
from mcore_ckpt_ext.layout.parallel import has_varying_layers
from mcore_ckpt_ext.layout_choice.local_columns import AFTER_LAYERS, BEFORE_LAYERS
from mcore_ckpt_ext.layout_choice.model_sizes import ModelSizes, Part, number_of
from mcore_ckpt_ext.layout_choice.model_table import (
    ModelTable,
    Parameter,
    embedding_copies,
    place_after_layers,
)
from mcore_ckpt_ext.layout_choice.padded_rows import ROWS_DIVISOR, PaddedRows
from mcore_ckpt_ext.model_space.anatomy import (
    block_of,
    is_in_vocabulary,
    language_prefix,
    pipelined_block,
    precedes_layers,
    second_names,
)
from mcore_ckpt_ext.model_space.names import is_module_buffer, parse, split_layer
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ, FP32_PARAM, PARAM_REMAINDER, WEIGHT
from mcore_ckpt_ext.optimizers.kept_precision import kept_dtypes
from mcore_ckpt_ext.planning.plan import named_tensor
from mcore_ckpt_ext.storage.dtypes import DTYPE_NAMES, dtype_named


def table_of(checkpoint: CheckpointView, job: JobArguments) -> ModelTable:
    """Return the parameters of a checkpoint's model.

    Raises:
        UnsupportedCheckpointError: the checkpoint does not describe its model completely.
    """
    names = checkpoint.names(WEIGHT)
    twice = second_names(names)
    if not names or not job.num_layers:
        raise UnsupportedCheckpointError(
            "the pipeline division of the checkpoint's model is unknown",
            found="no weights" if not names else f"num_layers {job.num_layers}",
            where=str(checkpoint.files.folder),
            hint="add what is missing, for example --argument num_layers=32",
        )
    block = pipelined_block(names)
    if block is None:
        stacks = sorted({stack for name in names if (stack := block_of(name)) is not None})
        raise UnsupportedCheckpointError(
            "layouts are planned only for a model whose layers form one stack",
            found=" and ".join(stacks) or "no layers",
            where=str(checkpoint.files.folder),
            hint="resume it under sizes of your choice: what does not fit is refused before anything changes",
        )
    _check_layers(checkpoint, job, job.num_layers, block)
    states = _States(checkpoint, job)
    prefix = language_prefix(block)
    tensors = {name: named_tensor(checkpoint, WEIGHT, name) for name in names}
    cut_of = newest_cuts({name: tensor.shape for name, tensor in tensors.items()}, job)
    parameters = []
    for name, tensor in tensors.items():
        if name in twice or is_module_buffer(name):
            continue
        width = _bytes_of(tensor.dtype)
        in_memory, stored, is_distributed = states.of(name, width)
        rows_of_tokens = is_in_vocabulary(name)
        shape = tensor.shape
        if rows_of_tokens and checkpoint.job.tokens is not None:
            shape = (min(checkpoint.job.tokens, shape[0]), *shape[1:])
        parameters.append(
            Parameter(
                name,
                shape,
                width,
                _place(name, block, prefix, job),
                cut_of(name),
                parse(name).expert,
                rows_of_tokens,
                in_memory,
                stored,
                is_distributed,
                stored_weight_bytes=_stored_width(checkpoint, name) or width,
            )
        )
    stored_rows = vocabulary_rows(checkpoint) or 0
    padded = PaddedRows(checkpoint.job.tokens, stored_rows, job.make_vocab_size_divisible_by or ROWS_DIVISOR)
    return ModelTable(parameters, job.num_layers, copies=embedding_copies(job), padded_rows=padded)


def _stored_width(checkpoint: CheckpointView, name: str) -> int | None:
    """Return the bytes of a stored element of a weight, which may be an fp32 master that a load rounds.

    Returns:
        None if the weight is not stored: it is derived, or there are only other parts.
    """
    stored = next(iter(checkpoint.stored_slices(WEIGHT, name)), None)
    return None if stored is None else _bytes_of(stored.extent.dtype)


def _check_layers(checkpoint: CheckpointView, job: JobArguments, declared: int, block: str) -> None:
    """Refuse a number of layers that the weights contradict: memory and pipeline division would be wrong."""
    layers = (split_layer(name)[0] for name in checkpoint.names(WEIGHT))
    stored_layers = 1 + max(layer.number for layer in layers if layer is not None and layer.block == block)
    # The last layers of a heterogeneous model may have no parameters.
    if stored_layers > declared or (stored_layers < declared and not has_varying_layers(job)):
        raise UnsupportedCheckpointError(
            "the number of layers is not that of the weights",
            found=f"num_layers {declared}",
            expected=quantity(stored_layers, "layer"),
            where=str(checkpoint.files.folder),
            hint=f"pass --argument num_layers={stored_layers}",
        )


def _place(name: str, block: str, prefix: str, job: JobArguments) -> int:
    layer, _ = split_layer(name)
    if layer is not None and layer.block == block:
        return layer.number
    if precedes_layers(name, prefix):
        return BEFORE_LAYERS
    return place_after_layers(name.removeprefix(prefix), job)


def table_of_arguments(job: JobArguments) -> ModelTable:
    """Return the large matrices of a job's model, by its arguments alone.

    Norms, biases, routers and convolutions are left out: they are small, and Megatron divides none of them in a way
    that the others do not require. The rows of the vocabulary are unknown without a tokenizer.
    """
    sizes = ModelSizes.of(job)
    states = state_bytes(job)
    layers = job.num_layers or len(sizes.layers)
    parameters = []

    def add(place: int, name: str, shape: tuple[int, int], cut: Cut | None, expert: int | None = None) -> None:
        is_vocabulary = name == "word_embeddings"
        shared = bool(job.use_distributed_optimizer)
        parameters.append(Parameter(name, shape, 2, place, cut, expert, is_vocabulary, states, 0, shared))

    rows = job.tokens or number_of(job, "padded_vocab_size", 0)
    if rows:
        add(BEFORE_LAYERS, "word_embeddings", (rows, sizes.hidden), Cut(0))
    if rows and job.untie_embeddings_and_output_weights:
        add(AFTER_LAYERS, "word_embeddings", (rows, sizes.hidden), Cut(0))
    for place, parts in enumerate(sizes.layers):
        for part in parts:
            for name, shape, cut, expert in _matrices(part, sizes):
                add(place, name, shape, cut, expert)
    padded = PaddedRows(job.tokens, 0, job.make_vocab_size_divisible_by or ROWS_DIVISOR)
    return ModelTable(parameters, layers, copies=embedding_copies(job), padded_rows=padded)


_Matrix = tuple[str, tuple[int, int], Cut | None, "int | None"]


def _matrices(part: Part, sizes: ModelSizes) -> Iterator[_Matrix]:
    """Yield the large matrices of a part of a layer."""
    hidden = sizes.hidden
    columns = Cut(0)
    rows = Cut(1)
    match part:
        case Part.ATTENTION if sizes.is_latent:
            yield "linear_kv_down_proj", (sizes.key_rank, hidden), None, None
            yield "linear_kv_up_proj", (sizes.key + sizes.value, sizes.key_rank), columns, None
            if sizes.query_rank:
                yield "linear_q_down_proj", (sizes.query_rank, hidden), None, None
            yield "linear_q_up_proj", (sizes.query, sizes.query_rank or hidden), columns, None
            yield "linear_proj", (hidden, sizes.value), rows, None
        case Part.ATTENTION:
            yield "linear_qkv", (sizes.query + 2 * sizes.key, hidden), None, None  # rules divide heads and groups
            yield "linear_proj", (hidden, sizes.value), rows, None
        case Part.LINEAR_ATTENTION:
            yield "in_proj", (2 * (sizes.linear_key + sizes.linear_value), hidden), columns, None
            yield "out_proj", (hidden, sizes.linear_value), rows, None
        case Part.MAMBA:
            yield "in_proj", (sizes.mamba_input, hidden), None, None  # rules divide heads and groups
            yield "out_proj", (hidden, sizes.mamba_inner), rows, None
        case Part.FEED_FORWARD:
            yield "linear_fc1", (sizes.gates * sizes.feed_forward, hidden), Cut(0, sizes.gates), None
            yield "linear_fc2", (hidden, sizes.feed_forward), rows, None
        case Part.EXPERTS:
            width = sizes.expert_feed_forward
            shared = sizes.shared_feed_forward
            for expert in range(sizes.experts):
                yield "linear_fc1", (sizes.gates * width, sizes.expert_width), Cut(0, sizes.gates), expert
                yield "linear_fc2", (sizes.expert_width, width), rows, expert
            if shared:
                yield "shared_fc1", (sizes.gates * shared, hidden), Cut(0, sizes.gates), None
                yield "shared_fc2", (hidden, shared), rows, None


class _States:
    """The bytes of optimizer state that each parameter has, in memory and in the checkpoint."""

    def __init__(self, checkpoint: CheckpointView, job: JobArguments) -> None:
        self._state = checkpoint.optimizer.state() if checkpoint.optimizer.format() else None
        self._in_memory = _state_dtypes(job)
        self._distributed = bool(job.use_distributed_optimizer)

    def of(self, name: str, weight_bytes: int) -> tuple[int, int, bool]:
        """Return the bytes of an element in memory and in the checkpoint, and True if ranks share them."""
        in_memory = stored = 0
        for kind, dtype in self._kinds_of(name).items():
            width = _bytes_of(dtype)
            stored += self._stored_bytes(kind, name, width, weight_bytes)
            # Masters of fp32 weights are the weights themselves (`_build_model_and_main_param_groups`,
            # megatron/core/optimizer/distrib_optimizer.py, core_v0.7.0 to 0.19.2).
            is_weight = kind == FP32_PARAM and weight_bytes == 4
            in_memory += 0 if is_weight else self._in_memory.get(kind, width)
        return in_memory, stored, self._state.is_distributed(name) if self._state else self._distributed

    def _kinds_of(self, name: str) -> dict[str, str]:
        """Return the dtypes of a parameter's state by kind; a master with a remainder is left out."""
        if self._state is None:
            return dict.fromkeys((FP32_PARAM, EXP_AVG, EXP_AVG_SQ), "float32")
        dtypes = self._state.dtypes_of(name)
        return {kind: dtype for kind, dtype in dtypes.items() if kind != FP32_PARAM or PARAM_REMAINDER not in dtypes}

    def _stored_bytes(self, kind: str, name: str, width: int, weight_bytes: int) -> int:
        """Return the bytes that are read for an element of a kind.

        A master is joined from its weight and its remainder, which `fully_reshardable` stores as a number in fp32;
        moments before the first step are not stored.
        """
        if self._state is None:
            return 0
        is_derived = self._state.derivation(kind, name) is not None
        if kind == PARAM_REMAINDER:
            return weight_bytes + (4 if is_derived else width)
        return 0 if is_derived else width


def state_bytes(job: JobArguments) -> int:
    """Return the bytes of optimizer state of an element of a bf16 weight, by a job's arguments alone."""
    widths = _state_dtypes(job)
    kinds = {**dict.fromkeys((FP32_PARAM, EXP_AVG, EXP_AVG_SQ), 4), **widths}
    return sum(kinds.values()) - 2 * (_has_remainders(job) and kinds[FP32_PARAM] == 4)


def _has_remainders(job: JobArguments) -> bool:
    """Return whether the optimizer keeps a remainder of 2 bytes in the place of an fp32 master of 4.

    Sources: `store_param_remainders`, megatron/core/optimizer/optimizer_config.py, core_v0.13.0 to 0.19.2; offloaded to
    the host, masters are in fp32 (`param_update_in_fp32`, cpu_offloading/hybrid_optimizer.py).
    """
    return bool(job.bf16 and has_fused_masters(job)) and job.raw.get("store_param_remainders") is not False


def _state_dtypes(job: JobArguments) -> dict[str, int]:
    """Return the bytes of kinds whose precision is an argument."""
    return {kind: _bytes_of(dtype) for kind, dtype in kept_dtypes(job).items()}


def _bytes_of(dtype: str) -> int:
    return dtype_named(dtype).itemsize if dtype in DTYPE_NAMES else 4
