"""Parses and composes names of parameters; no other module does.

A parameter has one name in model space, and three other forms:

    model space              decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight
    sharded key              decoder.layers.mlp.experts.experts.linear_fc1.weight      element (3, 5) of that array
    own, sequential experts  decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight
    own, grouped experts     decoder.layers.1.mlp.experts.linear_fc1.weight1

A rank's own names, in its `state_dict`, number layers from the first of its model chunk, and experts from its first.
Sources, core_v0.7.0 to 0.19.2: `sharded_state_dict` of megatron/core/transformer/transformer_block.py
(homogeneous blocks stack their layers into one array for each parameter, others have the layer in the key) and of
moe/experts.py (experts are always stacked).

Layers are numbered within a block (`anatomy.py`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from mcore_ckpt_ext.job.releases import FILTERS_ARE_FIRST
from mcore_ckpt_ext.model_space.anatomy import BLOCK, is_language_block

EXTRA_STATE = "_extra_state"
"""The suffix of extra states of Transformer Engine's modules, which contain no weights."""

_LAYER = re.compile(rf"^({BLOCK})\.layers\.(\d+)\.(.+)$")
PREDICTING_LAYER = "transformer_layer"
"""The name that checkpoints give the decoder layer within a layer for multi-token prediction."""
# A rank's own name for it is `mtp_model_layer` in 0.19, and the same as in checkpoints in 0.16
# (`MultiTokenPredictionLayer`, megatron/core/transformer/multi_token_prediction.py, core_v0.12.0 to 0.19.2).
_PREDICTION = re.compile(rf"^((?:\w+\.)*?mtp\.layers\.\d+)\.(?:mtp_model_layer|{PREDICTING_LAYER})\.(.+)$")
_EXPERT = re.compile(r"^(.*\.experts)\.experts\.(\d+)\.(.+)$")
_SEQUENTIAL_EXPERT = re.compile(r"^(.*\.experts)\.local_experts\.(\d+)\.(.+)$")
_GROUPED_EXPERT = re.compile(r"^(.*\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d+)$")
_FUSED_EXPERTS = re.compile(r"\.experts\.weight[12]$")
# The entries of a `_merger_list` are modules outside the layers that are always stacked, as layers are
# (`Qwen3VLVisionTransformerBlock.sharded_state_dict` of Megatron-Bridge 0.6.2).
_STACKED_LAYERS = re.compile(r"(?:(?:^|\.)layers|\.\w+_merger_list)\.(?!\d)")
_MERGER = re.compile(r"^(.+\.\w+_merger_list)\.(\d+)\.(.+)$")
_STACKED_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d)")
_GATED = re.compile(r"\.linear_fc1\.(weight|bias)$")
_MODULE_BUFFER = re.compile(r"\.router\.(expert_bias|local_tokens_per_expert)$")
_SPLIT = re.compile(r"^(.*\.(?:mixer|self_attention)\.(?:in_proj|conv1d)\.(?:weight|bias))\.([A-Za-z]+)(\d*)$")
_JOINED = re.compile(r"\.(mixer|self_attention)\.(in_proj|conv1d)\.(?:weight|bias)$")
_PARTS_STORED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("mixer", "in_proj"): ("z", "x", "B", "C", "dt"),
    ("mixer", "conv1d"): ("x", "B", "C"),
    ("self_attention", "in_proj"): ("query", "key", "value", "z", "beta", "alpha"),
    ("self_attention", "conv1d"): ("query", "key", "value"),
}
# The parts of a Mamba mixer, of a gated delta net and of a gated delta product, each in its order; parts of the last
# have numbers (V0, V1, ...).
_SPLIT_PARTS = ("query", "key", "value", "z", "x", "B", "C", "dt", "beta", "alpha", "V", "K", "Q", "b", "a")
# Filters of a Mamba mixer: direct parameters since 0.19, stored under the old key (`conv_checkpoint_key_map`).
_FILTERS = ("mixer.conv1d_", "mixer.conv1d.")

ShardedKey = tuple[str, tuple[int, ...]]
"""A key of Megatron's sharded state dict, and the index on its axes of layers and experts."""


class Layer(NamedTuple):
    """A layer of a model: the name of its block, and its number in it."""

    block: str
    number: int


class LayerSpec(Enum):
    """The origin of a transformer layer's modules, as far as names depend on it (gpt_layer_specs.py)."""

    TRANSFORMER_ENGINE = "transformer_engine"
    LOCAL = "local"
    LOCAL_LATENT = "local, latent attention"


# `sharded_state_dict_keys_map` of the local spec (`get_gpt_layer_local_spec`): its norms are separate modules, whose
# keys are those of norms fused with linears in the other spec. With latent attention there is no map.
_OWN_TO_KEY: Mapping[LayerSpec, Mapping[str, str]] = {
    LayerSpec.TRANSFORMER_ENGINE: {},
    LayerSpec.LOCAL: {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    },
    LayerSpec.LOCAL_LATENT: {},
}
# Replacements in model-space names of Transformer Engine's spec for the other specs.
_ENGINE_TO_SPEC: Mapping[LayerSpec, Mapping[str, str]] = {
    LayerSpec.TRANSFORMER_ENGINE: {},
    LayerSpec.LOCAL: {".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_"},
    LayerSpec.LOCAL_LATENT: {
        ".self_attention.linear_q_up_proj.layer_norm_": ".self_attention.q_layernorm.",
        ".self_attention.linear_kv_up_proj.layer_norm_": ".self_attention.kv_layernorm.",
        ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
    },
}

# A layer's norms, fused with the linear after it and separate.
_SPELLINGS = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
    (".self_attention.linear_q_up_proj.layer_norm_", ".self_attention.q_layernorm."),
    (".self_attention.linear_kv_up_proj.layer_norm_", ".self_attention.kv_layernorm."),
)


@dataclass(frozen=True, slots=True)
class ParameterName:
    """A parsed name; `str` composes the model-space name.

    Attributes:
        block: `decoder`, `vision_model.decoder`; None outside the layers.
        layer: the number of its layer; None outside the layers.
        experts: the path of the experts' module within the layer (`mlp.experts`); None for other parameters.
        expert: the number of its expert; None for other parameters.
        rest: the remaining name (`linear_fc1.weight`), or the whole name if it has no such numbers.
    """

    block: str | None
    layer: int | None
    experts: str | None
    expert: int | None
    rest: str

    def __str__(self) -> str:
        return self._layer_name(f"{self.experts}.experts.{self.expert}.{self.rest}" if self.experts else self.rest)

    def own(self, grouped_experts: bool) -> str:
        """Return the name in a rank's `state_dict`; a grouped linear has one extra state for all experts."""
        if self.experts is None:
            return str(self)
        if not grouped_experts:
            return self._layer_name(f"{self.experts}.local_experts.{self.expert}.{self.rest}")
        return self._layer_name(f"{self.experts}.{self.rest}{'' if is_extra_state(self.rest) else self.expert}")

    def sharded_key(self, stack_layers: bool) -> ShardedKey:
        """Return its array, with experts stacked, and layers if `stack_layers`; the inverse of `name_at`."""
        in_layer = self.rest if self.experts is None else f"{self.experts}.experts.{self.rest}"
        index = () if self.expert is None else (self.expert,)
        if self.layer is None and (merger := _MERGER.match(in_layer)):
            return f"{merger[1]}.{merger[3]}", (int(merger[2]),)
        if self.layer is None or not stack_layers:
            return self._layer_name(in_layer), index
        return f"{self.block}.layers.{in_layer}", (self.layer, *index)

    def counted_from(self, layer: int, expert: int) -> ParameterName:
        """Add the numbers of a rank's first layer and expert; layers of towers, never divided, keep theirs."""
        is_divided = self.block is not None and is_language_block(self.block)
        return replace(
            self,
            layer=self.layer + layer if self.layer is not None and is_divided else self.layer,
            expert=None if self.expert is None else self.expert + expert,
        )

    def _layer_name(self, text: str) -> str:
        return text if self.layer is None else f"{self.block}.layers.{self.layer}.{text}"


def parse(name: str) -> ParameterName:
    """Parse a model-space name."""
    return _parse(name, (_EXPERT,), ())


def parse_own(name: str, spec: LayerSpec) -> ParameterName:
    """Parse a name of a rank's `state_dict` as a sharded key, without the prefixes of wrappers.

    Layer and expert keep the rank's numbers, see `ParameterName.counted_from`.
    """
    renaming = (*_OWN_TO_KEY[spec].items(), _FILTERS)
    name = strip_wrappers(name)
    if match := _PREDICTION.match(name):
        name = f"{match[1]}.{PREDICTING_LAYER}.{with_prefix_replaced(match[2], renaming)}"
    return _parse(name, (_SEQUENTIAL_EXPERT, _GROUPED_EXPERT), renaming)


def own_name(name: ParameterName, spec: LayerSpec, grouped_experts: bool, version: tuple[int, int]) -> str:
    """Compose the name in a rank's `state_dict`, the inverse of `parse_own`.

    `name` already has the rank's numbers. A parameter that model space splits into parts is a single one on the rank.
    `version`: Megatron's version.
    """
    separate = {key: local_name for local_name, key in _OWN_TO_KEY[spec].items()}
    if FILTERS_ARE_FIRST.is_of(version):
        separate[_FILTERS[1]] = _FILTERS[0]
    is_mapped = name.block is not None and is_language_block(name.block)
    name = replace(name, rest=joined_name(f".{name.rest}").removeprefix("."))
    renamed = replace(name, rest=with_prefix_replaced(name.rest, separate.items())) if is_mapped else name
    return renamed.own(grouped_experts)


def _parse(name: str, experts: Sequence[re.Pattern[str]], renaming: Iterable[tuple[str, str]]) -> ParameterName:
    block = None
    layer = None
    rest = name
    if match := _LAYER.match(name):
        block = match[1]
        layer = int(match[2])
        rest = match[3]
        if is_language_block(block):  # the layers of vision towers have no such map (vit_layer_specs.py)
            rest = with_prefix_replaced(rest, renaming)
    for pattern in experts:
        if match := pattern.match(rest):
            number, leaf = (match[2], match[3]) if match[2].isdecimal() else (match[3], match[2])
            return ParameterName(block, layer, match[1], int(number), leaf)
    return ParameterName(block, layer, None, None, rest)


def with_prefix_replaced(suffix: str, renaming: Iterable[tuple[str, str]]) -> str:
    """Replace the prefix of a name by the first pair (old, new) that applies to it."""
    for old, new in renaming:
        if suffix.startswith(old):
            return new + suffix.removeprefix(old)
    return suffix


def strip_wrappers(name: str) -> str:
    """Remove the prefixes of wrappers around the model (DDP, Float16Module) from a name."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def under_spec(name: str, spec: LayerSpec) -> str:
    """Convert a model-space name of Transformer Engine's spec to another spec."""
    for engine, other in _ENGINE_TO_SPEC[spec].items():
        name = name.replace(engine, other)
    return name


def name_in(known: Container[str], name: str) -> str:
    """Return a name or sharded key as it occurs in `known`, which may have names of another layer spec.

    The two specs differ in the names of the norms of experts and of latent attention, and no layer has both.
    """
    if name in known:
        return name
    for fused, separate in _SPELLINGS:
        for spelling, other in ((fused, separate), (separate, fused)):
            if spelling in name and (spelled := name.replace(spelling, other)) in known:
                return spelled
    return name


def stacked_axes(key: str) -> int:
    """Return the number of leading axes for layers and experts of the array stored under a sharded key.

    A digit after `layers.` means that the key itself contains the number of its layer.
    """
    return bool(_STACKED_LAYERS.search(key)) + bool(_STACKED_EXPERTS.search(key))


def name_at(key: str, stack_index: Sequence[int]) -> str:
    """Return the model-space name of one element of a stacked array.

    Args:
        key: Megatron's sharded key.
        stack_index: index on each of the `stacked_axes(key)` leading axes.
    """
    index = list(stack_index)
    name = key
    for pattern in (_STACKED_LAYERS, _STACKED_EXPERTS):
        if match := pattern.search(name):
            name = f"{name[: match.end()]}{index.pop(0)}.{name[match.end() :]}"
    return name


def split_layer(name: str) -> tuple[Layer | None, str]:
    """Split a model-space name into its layer and the rest; (None, name) outside the layers."""
    match = _LAYER.match(name)
    return (Layer(match[1], int(match[2])), match[3]) if match else (None, name)


def layer_name(layer: Layer, suffix: str) -> str:
    """Return the model-space name of a layer's parameter; the inverse of `split_layer`."""
    return f"{layer.block}.layers.{layer.number}.{suffix}"


def is_of_experts(name: str) -> bool:
    """Return whether a model-space name or a sharded key belongs to experts that tokens are routed to."""
    return ".experts.experts." in name


def fuses_experts(own: str) -> bool:
    """Return whether a rank's own name denotes the matrix of all experts, transposed (GroupedMLP)."""
    return bool(_FUSED_EXPERTS.search(own))


def is_extra_state(name: str) -> bool:
    """Return whether a name denotes a module's extra state."""
    return name.endswith(EXTRA_STATE)


def is_module_buffer(name: str) -> bool:
    """Return whether a name denotes a buffer of the model, not a parameter (moe/router.py, since 0.10.0)."""
    return bool(_MODULE_BUFFER.search(name))


def is_first_linear(name: str) -> bool:
    """Return whether a name denotes the first linear of an MLP, which includes the gate if there is one."""
    return bool(_GATED.search(name))


def module_and_leaf(name: str) -> tuple[str, str]:
    """Return the last two parts of a name: `linear_qkv` and `weight`."""
    *_, module, leaf = ["", *name.split(".")]
    return module, leaf


def joined_name(name: str) -> str:
    """Return the name of the parameter that a part belongs to; return any other name unchanged."""
    match = _SPLIT.match(name)
    return match[1] if match and match[2] in _SPLIT_PARTS else name


def is_part(name: str) -> bool:
    """Return whether a model-space name denotes a part of a rank's parameter."""
    return joined_name(name) != name


def part_names(name: str) -> list[str]:
    """Return the names of the parts into which model space splits a rank's parameter, or its own name."""
    match = _JOINED.search(name)
    return [f"{name}.{part}" for part in _PARTS_STORED[match[1], match[2]]] if match else [name]


def split_parameters(names: Iterable[str]) -> dict[str, list[str]]:
    """Group parts of parameters stored in parts: `in_proj`, `conv1d` of mixers, delta nets and products.

    Sources: `MambaMixer.sharded_state_dict` (megatron/core/ssm/mamba_mixer.py, core_v0.9.0 to 0.19.2), which splits a
    rank's rows into z, x, B, C, dt (`in_proj.weight`) or x, B, C (`conv1d`), and that of a gated delta net
    (ssm/gated_delta_net/common.py, 0.19.2): query, key, value, z, beta, alpha, or query, key, value. A gated delta
    product of n Householder updates (`_get_in_proj_checkpoint_split_layout`, ssm/gated_delta_product.py, development
    head) has z, V0 to V(n-1), K0 to K(n-1), Q, b0 to b(n-1), a, or V0 to Q. Each part is sharded between
    tensor-parallel ranks separately; in memory, and in the gradient buffer, parts are contiguous.

    Returns:
        The names of all parts of each such parameter, in the order of its memory, by the name of the first part.
    """
    by_parameter: dict[str, list[tuple[int, int, str]]] = {}
    for name in names:
        if (match := _SPLIT.match(name)) and match[2] in _SPLIT_PARTS:
            place = _SPLIT_PARTS.index(match[2]), int(match[3] or 0)
            by_parameter.setdefault(match[1], []).append((*place, name))
    parts = [[name for *_, name in sorted(places)] for places in by_parameter.values()]
    return {names[0]: names for names in parts}
