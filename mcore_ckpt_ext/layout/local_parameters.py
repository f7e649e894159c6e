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
_EXPERT = re.compile(r"^(.*\.experts)\.experts\.(\d+)\.(.+)$")
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
    if _separates_norms(arguments):
        for module, key in _LOCAL_SPEC_NAMES.items():
            if suffix.startswith(module):
                return key + suffix.removeprefix(module)
    return suffix


def _separates_norms(arguments: Mapping[str, Any]) -> bool:
    """Whether norms are modules of their own that the sharded keys show as parts of the linear after them."""
    return arguments.get("transformer_impl", "local") == "local" and not arguments.get("multi_latent_attention")


class LocalNames:
    """The way back: from model space to the names in the `state_dict` of a job with given arguments."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._separate_norms = _separates_norms(arguments)
        self._grouped = bool(arguments.get("moe_grouped_gemm"))
        if self._grouped and arguments.get("transformer_impl", "local") == "local" and arguments.get("num_experts"):
            raise UnsupportedCheckpointError(
                "grouped experts of the local layer spec are one transposed matrix (GroupedMLP), which is not written",
                helps="convert --to torch_dist",
            )

    def local(self, name: str, first_layer: int, first_expert: int, tied_copy: bool) -> str:
        """The name of a tensor in the chunk that begins with these layer and expert numbers.

        `tied_copy`: the chunk holds the word embeddings as its output layer.
        """
        if name == WORD_EMBEDDINGS and tied_copy:
            return "output_layer.weight"
        if layer := _LAYER.match(name):
            suffix = layer[2]
            for module, key in _LOCAL_SPEC_NAMES.items() if self._separate_norms else ():
                if suffix.startswith(key):
                    suffix = module + suffix.removeprefix(key)
            name = f"decoder.layers.{int(layer[1]) - first_layer}.{suffix}"
        if expert := _EXPERT.match(name):
            number = int(expert[2]) - first_expert
            if not self._grouped:
                return f"{expert[1]}.local_experts.{number}.{expert[3]}"
            # A grouped linear has one extra state for all of its experts.
            return f"{expert[1]}.{expert[3]}{'' if expert[3].endswith('_extra_state') else number}"
        return name

    @staticmethod
    def layer_of(name: str) -> int | None:
        """The global decoder layer of a name; None outside of the layers."""
        match = _LAYER.match(name)
        return int(match[1]) if match else None

    @staticmethod
    def expert_of(name: str) -> int | None:
        """The global expert of a name; None for everything else."""
        match = _EXPERT.match(name)
        return int(match[2]) if match else None


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


def shard_grid(
    name: str, shape: tuple[int, ...], ranks: int, arguments: Mapping[str, Any], version: tuple[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Where the shards of a tensor begin, axis by axis, when `ranks` tensor-parallel ranks share it.

    The rules are those of `regions_of`. The down projections of latent attention are cut up to 0.13 and by the local
    layer spec, and whole on every rank of Transformer Engine's since 0.14 (gpt_layer_specs.py, `linear()`).

    Raises:
        UnsupportedCheckpointError: no rule says how it is cut, or it does not divide.
    """
    module = name.split(".")[-2] if "." in name else name
    gated = bool(_GATED.search(name) and (arguments.get("swiglu") or arguments.get("quick_geglu")))
    if module in _DOWN_PROJECTIONS and ranks > 1:
        cut = arguments.get("transformer_impl", "local") == "local" or version < (0, 14)
        axis: int | None = 0 if cut else None
    else:
        axis = 0 if gated and ranks > 1 else _cut_axis(name, shape, TensorPart(0, ranks), arguments)
    parts = ranks * (2 if gated else 1)
    if axis is None:
        return tuple((0,) for _ in shape)
    if shape[axis] % parts:
        raise UnsupportedCheckpointError(
            "a parameter does not divide between the tensor-parallel ranks",
            found=f"{shape[axis]} elements along axis {axis}",
            expected=f"a multiple of {parts}",
            where=name,
            helps="choose a tensor parallel size that divides the model",
        )
    size = shape[axis] // parts
    return tuple(tuple(range(0, shape[a], size)) if a == axis else (0,) for a in range(len(shape)))


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
