"""Maps a rank's parameters to model space: their names, and their part of the whole tensor.

A legacy checkpoint stores each rank's `state_dict` under the rank's own names and records neither. Sources, core_v0.7.0
to 0.19.2: `megatron/core/tensor_parallel/layers.py` (ColumnParallelLinear divides the output features, axis 0, and its
bias; RowParallelLinear the input features, axis 1, and replicates its bias; VocabParallelEmbedding the rows),
`megatron/core/models/gpt/gpt_layer_specs.py` and `gpt_model.py` (the class of each module),
`megatron/core/transformer/moe/experts.py` (names and numbers of experts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.job.hybrid_pattern import is_hybrid
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.model_arguments import is_gated
from mcore_ckpt_ext.job.releases import KEEPS_DOWN_PROJECTIONS_WHOLE
from mcore_ckpt_ext.model_space.anatomy import (
    block_of,
    is_language_block,
    is_output_layer,
    is_word_embeddings,
    output_layer_of,
    pipelined_block,
    word_embeddings_of,
)
from mcore_ckpt_ext.model_space.names import (
    LayerSpec,
    fuses_experts,
    is_first_linear,
    is_part,
    module_and_leaf,
    own_name,
    parse,
    parse_own,
    split_layer,
    strip_wrappers,
)
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.versions import NEWEST

_COLUMN_PARALLEL = {
    "linear_qkv",
    "linear_q",
    "linear_kv",  # attention.py: self and cross attention
    "linear_q_proj",
    "linear_q_up_proj",
    "linear_kv_up_proj",  # multi_latent_attention.py
    "eh_proj",
    "output_layer",  # multi_token_prediction.py, gpt_model.py
    "word_embeddings",  # language_model_embedding.py: VocabParallelEmbedding
}
_ROW_PARALLEL = {"linear_proj", "linear_fc2", "out_proj"}
_REPLICATED = {
    "input_layernorm",
    "pre_mlp_layernorm",
    "pre_cross_attn_layernorm",
    "q_layernorm",
    "k_layernorm",
    "kv_layernorm",
    "final_layernorm",
    "final_norm",
    "post_layernorm",
    "enorm",
    "hnorm",
    "router",
    "position_embeddings",
    "tokentype_embeddings",
    "relative_attention_bias",
    "binary_head",  # t5_model.py, bert_model.py
    "conv1",
    "ln_pre",
    "ln_post",  # clip_vit_model.py
    "out_norm",  # gated_delta_net/common.py
    "linear_wq_b",
    "linear_wk",
    "linear_weights_proj",
    "k_norm",  # the indexer of dsa.py: parallel_mode="duplicated"
    "fc1_latent_proj",
    "fc2_latent_proj",  # moe_layer.py: the same
}
_REPLICATED_HEADS = ("lm_head.dense.", "lm_head.layer_norm.", "pooler.dense.")  # bert_lm_head.py, pooler.py
# Parameters of fused norms (extensions/transformer_engine.py), of the shared expert's gate (shared_experts.py), of a
# tower (clip_vit_model.py).
_REPLICATED_LEAVES = {"layer_norm_weight", "layer_norm_bias", "gate_weight", "class_token"}
# Parameters of a Mamba mixer and of a gated delta net with one or a few elements for each head (mamba_mixer.py,
# gated_delta_net.py).
_BY_HEADS = {"A_log", "D", "dt_bias"}
_NORM_OF_MIXER = ".mixer.norm.weight"
# Sharded in some versions and replicated in others (multi_latent_attention.py). Each has the arguments whose sum is the
# number of rows of the whole parameter.
_DOWN_PROJECTIONS = {
    "linear_q_down_proj": ("q_lora_rank",),
    "linear_kv_down_proj": ("kv_lora_rank", "qk_pos_emb_head_dim"),
}


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The place among the ranks that share a tensor: number `rank` of `ranks`.

    `gated`: whether a first linear includes a gate; None to decide by the job's arguments.
    """

    rank: int
    ranks: int
    gated: bool | None = None


def model_space_name(local: str, first_layer: int, first_expert: int, arguments: JobArguments) -> str:
    """Return the model-space name of a parameter.

    Args:
        local: its name in the rank's own `state_dict`.
        first_layer: global number of the model chunk's first decoder layer.
        first_expert: global number of the rank's first expert.
        arguments: Megatron's arguments of the job that wrote it.

    Raises:
        UnsupportedCheckpointError: the order of its elements is not supported.
    """
    if is_output_layer(strip_wrappers(local)) and not arguments.untie_embeddings_and_output_weights:
        return word_embeddings_of(strip_wrappers(local))
    if fuses_experts(local):
        raise UnsupportedCheckpointError(
            "the experts are stored as one transposed matrix (GroupedMLP), which this package does not read",
            where=local,
            hint="resume it once under its own layout and save with --ckpt-format torch_dist",
        )
    return str(parse_own(local, _layer_spec(arguments)).counted_from(first_layer, first_expert))


def _is_local(arguments: JobArguments) -> bool:
    """Return whether the layers have the local spec, the default of versions that do not record one."""
    return (arguments.transformer_impl or "local") == "local"


def _layer_spec(arguments: JobArguments) -> LayerSpec:
    """Return the layer spec; hybrid models have only one, without a map of keys (hybrid_layer_specs.py)."""
    if not _is_local(arguments) or is_hybrid(arguments):
        return LayerSpec.TRANSFORMER_ENGINE
    return LayerSpec.LOCAL_LATENT if arguments.multi_latent_attention else LayerSpec.LOCAL


class LocalNames:
    """Names in the `state_dict` of a job with given arguments; the inverse of `model_space_name`."""

    def __init__(self, arguments: JobArguments, version: tuple[int, int]) -> None:
        """`version`: Megatron's version."""
        self._spec = _layer_spec(arguments)
        self._version = version
        self._grouped = bool(arguments.moe_grouped_gemm)
        if self._grouped and _is_local(arguments) and arguments.num_experts:
            raise UnsupportedCheckpointError(
                "grouped experts of the local layer spec are one transposed matrix (GroupedMLP), which this package "
                "does not write",
                hint="use --to torch_dist",
            )

    def local(self, name: str, first_layer: int, first_expert: int, tied_copy: bool) -> str:
        """Return the name of a tensor in the chunk that begins with these layer and expert numbers.

        `tied_copy`: whether the chunk has the word embeddings as its output layer.
        """
        if is_word_embeddings(name) and tied_copy:
            return output_layer_of(name)
        return own_name(parse(name).counted_from(-first_layer, -first_expert), self._spec, self._grouped, self._version)


def tower_gates(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Return whether each first linear layer outside the language model is gated, by name.

    The arguments describe only the language model. A gated linear has twice as many rows as the next one has columns
    (megatron/core/transformer/mlp.py, core_v0.7.0 to 0.19.2).

    Args:
        shapes: shapes of a model's weights, or of a rank's parts of them, by model-space name.
    """
    gated = {}
    for name, shape in shapes.items():
        following = shapes.get(f"{name.rpartition('.')[0].removesuffix('linear_fc1')}linear_fc2.weight")
        if is_first_linear(name) and following is not None and not _is_of_language_layer(name):
            gated[name] = shape[0] == 2 * following[1]
    return gated


def _is_of_language_layer(name: str) -> bool:
    block = block_of(name)
    return block is not None and is_language_block(block)


def layers_of(local_names: Mapping[str, object]) -> int:
    """Return the number of layers of the divided block in a rank's chunk, by its `state_dict`'s names."""
    names = [strip_wrappers(name) for name in local_names]
    block = pipelined_block(names)
    layers = (split_layer(name)[0] for name in names)
    return len({layer.number for layer in layers if layer is not None and layer.block == block})


@dataclass(frozen=True, slots=True)
class Cut:
    """How tensor parallelism shards a tensor: along `axis`, in `bands` that are sharded separately.

    A gated `linear_fc1` has two bands: a rank has its rows of the gate, then its rows of the up projection
    (megatron/core/transformer/mlp.py, `apply_swiglu_sharded_factory`).
    """

    axis: int
    bands: int = 1


def regions_of(
    name: str, shape: tuple[int, ...], part: TensorPart, arguments: JobArguments
) -> tuple[tuple[int, ...], tuple[Region, ...]]:
    """Return the position of a rank's part in the whole tensor.

    Args:
        name: model-space name.
        shape: the shape of the rank's part.
        part: the rank's place among the ranks that share the tensor.
        arguments: the arguments of the job that wrote it.

    Returns:
        The shape of the whole tensor, and the part's regions in the order of the rank's memory.

    Raises:
        UnsupportedCheckpointError: the tensor-parallel split is unknown.
    """
    cut = _cut(name, shape, part, arguments)
    if cut is None:
        return shape, (Region.whole(name, shape),)
    size = shape[cut.axis] // cut.bands
    starts = ((band * part.ranks + part.rank) * size for band in range(cut.bands))
    whole = (*shape[: cut.axis], shape[cut.axis] * part.ranks, *shape[cut.axis + 1 :])
    return whole, tuple(Region.band(name, shape, cut.axis, start, start + size) for start in starts)


def shard_grid(
    name: str,
    shape: tuple[int, ...],
    ranks: int,
    arguments: JobArguments,
    version: tuple[int, int],
    gated: bool | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Return the offsets of a tensor's shards on each axis, with `ranks` tensor-parallel ranks.

    Args:
        name: model-space name.
        shape: the shape of the whole tensor.
        ranks: the number of ranks that share it.
        arguments: the arguments of the job that will read it.
        version: the version of Megatron that will read it.
        gated: whether a first linear includes a gate; None to decide by the arguments.

    Raises:
        UnsupportedCheckpointError: the tensor-parallel split is unknown, or the tensor is not divisible.
    """
    cut = _cut(name, shape, TensorPart(0, ranks, gated), arguments, version)
    if cut is None:
        return tuple((0,) for _ in shape)
    parts = ranks * cut.bands
    if shape[cut.axis] % parts:
        raise UnsupportedCheckpointError(
            "a parameter cannot be divided among the tensor-parallel ranks",
            found=f"{quantity(shape[cut.axis], 'element')} along axis {cut.axis}",
            expected=f"a multiple of {parts}",
            where=name,
            hint="choose a tensor-parallel size that divides it",
        )
    size = shape[cut.axis] // parts
    return tuple(tuple(range(0, length, size)) if axis == cut.axis else (0,) for axis, length in enumerate(shape))


def newest_cuts(shapes: Mapping[str, tuple[int, ...]], arguments: JobArguments) -> Callable[[str], Cut | None]:
    """Return how the newest version shards each tensor of a model, by name; None if it is replicated.

    Args:
        shapes: the shapes of all tensors, by model-space name.
        arguments: the job's arguments.

    Returns:
        A function that raises UnsupportedCheckpointError where the tensor-parallel split is unknown.
    """
    gates = tower_gates(shapes)
    return lambda name: _cut(name, shapes[name], TensorPart(0, 2, gates.get(name)), arguments, NEWEST)


def _cut(
    name: str, shape: tuple[int, ...], part: TensorPart, arguments: JobArguments, version: tuple[int, int] | None = None
) -> Cut | None:
    """Return how a tensor is sharded; None if it is replicated.

    The down projections of latent attention are sharded up to 0.13 and in the local layer spec, and replicated in
    Transformer Engine's spec since 0.14 (gpt_layer_specs.py, `linear()`). Without a `version`, the sizes decide.
    """
    module, leaf = module_and_leaf(name)
    is_whole = leaf in _REPLICATED_LEAVES or module in _REPLICATED or name.startswith(_REPLICATED_HEADS)
    if part.ranks == 1 or is_whole:
        return None
    # `softmax_offset`: one element for each head (dot_product_attention.py).
    if leaf == "softmax_offset" or leaf in _BY_HEADS or is_part(name) or name.endswith(_NORM_OF_MIXER):
        return Cut(0)
    if module == "norm":  # the norm before a mixer, in a layer spec that does not fuse it
        return None
    if leaf in ("weight", "bias"):
        if is_first_linear(name):
            return Cut(0, 2 if (is_gated(arguments) if part.gated is None else part.gated) else 1)
        if module in _COLUMN_PARALLEL:
            return Cut(0)
        if module in _ROW_PARALLEL:
            return Cut(1) if leaf == "weight" else None
        if module in _DOWN_PROJECTIONS:
            whole = sum(arguments.value(size) or 0 for size in _DOWN_PROJECTIONS[module])
            is_cut = (
                shape[0] != whole
                if version is None
                else _is_local(arguments) or not KEEPS_DOWN_PROJECTIONS_WHOLE.is_of(version)
            )
            return Cut(0) if is_cut else None
    raise UnsupportedCheckpointError(
        "the tensor-parallel split of a parameter is unknown",
        found=f"{name}, {shape} on each of {quantity(part.ranks, 'rank')}",
        hint="resume it once under its own layout and save with --ckpt-format torch_dist, which records the split",
    )
