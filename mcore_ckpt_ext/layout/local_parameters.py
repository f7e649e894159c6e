"""What a rank's own parameters are in model space: their names there, and which part of the whole they are.

A legacy checkpoint stores each rank's `state_dict` under the rank's own names and says neither. Sources, core_v0.7.0
to 0.19.2: `megatron/core/tensor_parallel/layers.py` (ColumnParallelLinear cuts the output features, axis 0, and its
bias; RowParallelLinear the input features, axis 1, and keeps its bias whole; VocabParallelEmbedding the rows),
`megatron/core/models/gpt/gpt_layer_specs.py` and `gpt_model.py` (which module is of which class),
`megatron/core/transformer/moe/experts.py` (names and numbers of experts).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.layout.parameter_order import WORD_EMBEDDINGS
from mcore_ckpt_ext.model_space.slices import Region

_COLUMN_PARALLEL = {
    "linear_qkv", "linear_q", "linear_kv",  # attention.py: self and cross attention
    "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj",  # multi_latent_attention.py
    "linear_fc1", "eh_proj", "output_layer",  # mlp.py, multi_token_prediction.py, gpt_model.py
    "word_embeddings",  # language_model_embedding.py: VocabParallelEmbedding
}  # fmt: skip
_ROW_PARALLEL = {"linear_proj", "linear_fc2"}
_REPLICATED = {
    "input_layernorm", "pre_mlp_layernorm", "pre_cross_attn_layernorm", "q_layernorm", "k_layernorm", "kv_layernorm",
    "final_layernorm", "enorm", "hnorm", "router", "position_embeddings", "tokentype_embeddings",
}  # fmt: skip
# Parameters of fused norms (extensions/transformer_engine.py) and of the shared expert's gate (shared_experts.py).
_REPLICATED_LEAVES = {"layer_norm_weight", "layer_norm_bias", "gate_weight"}
# Cut in some versions and whole in others (multi_latent_attention.py): the sizes that a whole one has tell.
_DOWN_PROJECTIONS = {
    "linear_q_down_proj": ("q_lora_rank",),
    "linear_kv_down_proj": ("kv_lora_rank", "qk_pos_emb_head_dim"),
}

# `sharded_state_dict_keys_map` of the local spec (gpt_layer_specs.py, `get_gpt_layer_local_spec`).
_LOCAL_SPEC_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_SEQUENTIAL_EXPERT = re.compile(r"^(.*\.experts)\.local_experts\.(\d+)\.(.+)$")
_GROUPED_EXPERT = re.compile(r"^(.*\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)$")
_GATED = re.compile(r"\.linear_fc1\.(weight|bias)$")
_FUSED_EXPERTS = re.compile(r"\.experts\.weight[12]$")


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The place among the ranks that share a tensor: number `rank` of `ranks`."""

    rank: int
    ranks: int


def model_space_name(local: str, first_layer: int, first_expert: int, arguments: Mapping[str, Any]) -> str:
    """The model-space name of a parameter.

    Args:
        local: its name in the rank's own `state_dict`.
        first_layer: global number of the model chunk's first decoder layer.
        first_expert: global number of the rank's first expert.
        arguments: Megatron's arguments of the job that wrote it.

    Raises:
        UnsupportedCheckpointError: it is of a kind whose elements lie in another order than anybody else's.
    """
    name = _unwrapped(local)
    if name == "output_layer.weight" and not arguments.get("untie_embeddings_and_output_weights"):
        return WORD_EMBEDDINGS
    if _FUSED_EXPERTS.search(name):
        raise UnsupportedCheckpointError(
            "the experts are stored as one transposed matrix (GroupedMLP), which is not read",
            where=local,
            helps="load and save the checkpoint once with Megatron's torch_dist format, under its own layout",
        )
    if layer := _LAYER.match(name):
        name = f"decoder.layers.{first_layer + int(layer[1])}.{_name_in_layer(layer[2], arguments)}"
    if expert := _SEQUENTIAL_EXPERT.match(name):
        return f"{expert[1]}.experts.{first_expert + int(expert[2])}.{expert[3]}"
    if expert := _GROUPED_EXPERT.match(name):
        return f"{expert[1]}.experts.{first_expert + int(expert[4])}.{expert[2]}.{expert[3]}"
    return name


def _name_in_layer(suffix: str, arguments: Mapping[str, Any]) -> str:
    if arguments.get("transformer_impl", "local") == "local" and not arguments.get("multi_latent_attention"):
        for module, key in _LOCAL_SPEC_NAMES.items():
            if suffix.startswith(module):
                return key + suffix.removeprefix(module)
    return suffix


def layers_of(local_names: Mapping[str, object]) -> int:
    """How many decoder layers a rank's model chunk has, by the names of its `state_dict`."""
    matches = (_LAYER.match(_unwrapped(name)) for name in local_names)
    return len({match[1] for match in matches if match})


def _unwrapped(local: str) -> str:
    """A name without the wrappers around the model (DDP, Float16Module)."""
    while local.startswith("module."):
        local = local.removeprefix("module.")
    return local


def regions_of(
    name: str, shape: tuple[int, ...], part: TensorPart, arguments: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[Region, ...]]:
    """Where a rank's part of a tensor lies in the whole.

    A gated `linear_fc1` holds the rank's rows of the gate, then its rows of the up projection
    (megatron/core/transformer/mlp.py, `apply_swiglu_sharded_factory`).

    Args:
        name: model-space name.
        shape: of the rank's part.
        part: the rank's place among those that share the tensor.
        arguments: Megatron's arguments of the job that wrote it.

    Returns:
        The shape of the whole tensor, and the part's regions in the order of the rank's memory.

    Raises:
        UnsupportedCheckpointError: no rule says how tensor parallelism cuts it.
    """
    gated = _GATED.search(name) and (arguments.get("swiglu") or arguments.get("quick_geglu"))
    axis = 0 if gated else _cut_axis(name, shape, part, arguments)
    if axis is None:
        return shape, (Region.whole(name, shape),)
    whole = _with_size(shape, axis, shape[axis] * part.ranks)
    bands = 2 if gated else 1
    size = shape[axis] // bands
    sizes = _with_size(shape, axis, size)
    starts = ((band * part.ranks + part.rank) * size for band in range(bands))
    return whole, tuple(Region(name, _with_size((0,) * len(shape), axis, start), sizes) for start in starts)


def _cut_axis(name: str, shape: tuple[int, ...], part: TensorPart, arguments: Mapping[str, Any]) -> int | None:
    """The axis that tensor parallelism cuts; None where every rank has the whole."""
    *_, module, leaf = ["", *name.split(".")]
    if part.ranks == 1 or leaf in _REPLICATED_LEAVES or module in _REPLICATED:
        return None
    if leaf in ("weight", "bias"):
        if module in _COLUMN_PARALLEL:
            return 0
        if module in _ROW_PARALLEL:
            return 1 if leaf == "weight" else None
        if module in _DOWN_PROJECTIONS:
            whole = sum(int(arguments.get(size) or 0) for size in _DOWN_PROJECTIONS[module])
            return None if shape[0] == whole else 0
    raise UnsupportedCheckpointError(
        "no rule says how tensor parallelism cuts a parameter of this legacy checkpoint",
        found=f"{name}, {shape} on each of {part.ranks} ranks",
        helps="load it once under its own layout and save with --ckpt-format torch_dist, which records the cut",
    )


def _with_size(sizes: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*sizes[:axis], size, *sizes[axis + 1 :])
