"""The order in which a model chunk registers its parameters.

It follows from known layer specs, or from observation of a live model.

The order determines the position of each parameter in the gradient buffer, and no checkpoint records it. Sources:
`megatron/core/models/gpt/gpt_model.py` (embedding, decoder, output layer), `gpt_layer_specs.py` and
`transformer_layer.py` (submodules of a layer), `extensions/transformer_engine.py` (fused norm before the weight of its
linear); core_v0.7.0 to 0.19.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from mcore_ckpt_ext.job.hybrid_pattern import is_hybrid
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import FILTERS_ARE_FIRST
from mcore_ckpt_ext.model_space.anatomy import (
    WORD_EMBEDDINGS,
    is_language_block,
    is_output_layer,
    is_word_embeddings,
    language_prefix,
    output_layer_of,
    word_embeddings_of,
)
from mcore_ckpt_ext.model_space.names import Layer, layer_name, parse, split_layer
from mcore_ckpt_ext.versions import OLDEST


def _both(*modules: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for module in modules for name in ("weight", "bias"))


def _norm(module: str) -> tuple[str, ...]:
    return (f"{module}.layer_norm_weight", f"{module}.layer_norm_bias")


_QKV = "self_attention.linear_qkv"
_PROJ = "self_attention.linear_proj"
_FC1 = "mlp.linear_fc1"
_FC2 = "mlp.linear_fc2"
_QK_NORMS = _both(*(f"self_attention.{name}" for name in ("q_layernorm", "k_layernorm", "kv_layernorm")))
# Latent attention (multi_latent_attention.py), with compressed or plain queries.
_LATENT = [
    f"self_attention.{name}"
    for name in ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
]
# Parameters of the core attention come first: sinks (dot_product_attention.py), and an indexer, which only the
# Transformer Engine spec has (experimental_attention_variant/dsa.py, core_v0.16 to 0.19.2).
_CORE_ATTENTION = tuple(
    f"self_attention.core_attention.{name}"
    for name in ("softmax_offset", "indexer.linear_wq_b.weight", "indexer.linear_wk.weight",
                 *_both("indexer.k_norm"), "indexer.linear_weights_proj.weight")
)  # fmt: skip
_CROSS = _both(
    "pre_cross_attn_layernorm", *(f"cross_attention.{name}" for name in ("linear_proj", "linear_q", "linear_kv"))
)
_EXPERTS = ("experts",)
# A gated delta net (gated_delta_net/common.py) and a Mamba mixer (mamba_mixer.py). Their filters are separate modules
# up to 0.18, and parameters of the net or mixer itself since 0.19. A split parameter has the name of its first part.
_NET = (
    *(f"self_attention.{name}" for name in ("dt_bias", "A_log")), *_norm("self_attention.in_proj"),
    *(f"self_attention.{name}" for name in (
        "in_proj.weight.query", "conv1d.weight.query", "conv1d.bias.query", "out_norm.weight", "out_proj.weight",
    )),
)  # fmt: skip
_FILTERS = ("mixer.conv1d.weight.x", "mixer.conv1d.bias.x")
# A gated delta product (ssm/gated_delta_product.py, development head): always a module.
_FILTERS_OF_PRODUCT = ("mixer.conv1d.weight.V0", "mixer.conv1d.bias.V0")
_SCALES = ("mixer.dt_bias", "mixer.A_log", "mixer.D")


def _mixer(filters_first: bool) -> tuple[str, ...]:
    first, then = (_FILTERS, ()) if filters_first else ((), _FILTERS)
    projection = (*_norm("mixer.in_proj"), "mixer.in_proj.weight.z", *_FILTERS_OF_PRODUCT)
    return (*first, *_SCALES, *projection, *then, "mixer.norm.weight", "mixer.out_proj.weight", *_both("norm"))


# Projections to and from the latent size of experts (moe_layer.py, core_v0.16.0 to 0.19.2): Transformer Engine's.
_LATENT_EXPERTS = _both("mlp.fc1_latent_proj", "mlp.fc2_latent_proj")
# A module's own parameters precede those of its submodules: the gate comes first (moe/shared_experts.py).
_SHARED = ("mlp.shared_experts.gate_weight", *_both("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"))

# Parameters of one decoder layer in registration order, by their sharded-key suffix. "experts" represents all
# parameters of all experts. The local spec stores its separate norms under the fused keys of the other spec.
_LOCAL = (
    *_norm(_QKV), *_both("input_layernorm"), *_CORE_ATTENTION, *_both(_PROJ, _QKV, *_LATENT), *_QK_NORMS,
    *_CROSS, *_norm(_FC1), *_both("pre_mlp_layernorm", _FC1, _FC2, "mlp.router"), *_LATENT_EXPERTS, *_EXPERTS, *_SHARED,
)  # fmt: skip
_TRANSFORMER_ENGINE = (
    *_both("input_layernorm"), *_CORE_ATTENTION, *_both(_PROJ),
    *(name for linear in (_QKV, *_LATENT) for name in (*_norm(linear), *_both(linear))), *_QK_NORMS,
    *_CROSS, *_both("pre_mlp_layernorm"), *_norm(_FC1), *_both(_FC1, _FC2, "mlp.router"), *_LATENT_EXPERTS, *_EXPERTS,
    *_SHARED,
)  # fmt: skip

# Parameters outside the layers, and blocks of layers, in registration order: of a language model (GPT, hybrid, BERT,
# T5), of a tower, and of a projector (gpt_model.py, bert_model.py, t5_model.py, clip_vit_model.py,
# multimodal_projector.py; llava_model.py registers them in this order).
_LANGUAGE_MODEL = (
    WORD_EMBEDDINGS, "embedding.position_embeddings.weight", "position_embeddings.weight",
    "embedding.tokentype_embeddings.weight",
    *(f"{part}_relative_pos_emb.relative_attention_bias.weight" for part in ("encoder", "decoder")),
    "encoder", *_both("encoder.final_layernorm"), "decoder", *_both("decoder.final_layernorm", "decoder.final_norm"),
    "mtp", *_both("lm_head.dense", "lm_head.layer_norm", "lm_head.output_layer", "output_layer"),
    *_both("binary_head", "pooler.dense"),
)  # fmt: skip
_TOWER = (
    "class_token", *_both("ln_pre", "ln_post", "conv1"), "position_embeddings.weight", "decoder",
    *_both("decoder.final_layernorm"),
)  # fmt: skip
_PROJECTOR = (*_both("encoder.linear_fc1", "encoder.linear_fc2", "encoder"),)
_OUTSIDE_LAYERS = {
    item: number
    for number, item in enumerate((
        *_LANGUAGE_MODEL,
        *(f"vision_model.{item}" for item in _TOWER),
        *(f"vision_projection.{item}" for item in _PROJECTOR),
    ))
}  # fmt: skip

# MIMO registers towers and projectors before the language model (mimo/model/base.py, mimo/submodules/base.py,
# core_v0.14.0 to 0.19.2), under names that the user chooses.
_OF_MIMO = (
    (re.compile(r"^modality_submodules\.\w+\.encoders\.\w+\."), "vision_model."),
    (re.compile(r"^modality_submodules\.\w+\.input_projections\.\d+\."), "vision_projection."),
)


# The parts of a layer for multi-token prediction around its decoder layer, in registration order
# (`MultiTokenPredictionLayer`, transformer/multi_token_prediction.py, core_v0.12.0 to 0.19.2).
_PREDICTION = re.compile(r"^mtp\.layers\.(\d+)\.(.+)$")
_INNER = "transformer_layer"
_AROUND = {item: number for number, item in enumerate((*_both("enorm", "hnorm", "eh_proj"), _INNER,
                                                       *_both("final_layernorm")))}  # fmt: skip


def _rank_among_known(item: str, prefix: str) -> int | None:
    """Return an item's position among all known ones; `prefix`: the prefix of language model names."""
    for expression, part in _OF_MIMO:
        if match := expression.match(item):
            rank = _OUTSIDE_LAYERS.get(part + item[match.end() :])
            return None if rank is None else rank - len(_OUTSIDE_LAYERS)
    return _OUTSIDE_LAYERS.get(item.removeprefix(prefix))


class ParameterOrder(Protocol):
    """A source of the registration order."""

    @property
    def label(self) -> str:
        """The name of the order in messages."""

    def order_outside_layers(self, items: Sequence[str]) -> list[str] | None:
        """Return parameters outside the layers, and blocks, in registration order; None if one is unknown."""

    def order_in_layer(self, layer: Layer, suffixes: Sequence[str]) -> list[str] | None:
        """Return the suffixes of one layer in registration order; None if one is unknown."""


class KnownOrder:
    """The order of one of Megatron's own layer specs, of a GPT or a hybrid model."""

    def __init__(
        self, label: str, template: Sequence[str], experts_by_matrix: bool, filters_first: bool = True
    ) -> None:
        """`filters_first`: whether mixers register their filters first, as since 0.19."""
        self.label = label
        self._template = template
        self._rank = {suffix: number for number, suffix in enumerate((*_mixer(filters_first), *_NET, *template))}
        self._experts_by_matrix = experts_by_matrix

    def order_of_version(self, version: tuple[int, int]) -> KnownOrder:
        """Return the order of the same spec in a version of Megatron."""
        return KnownOrder(self.label, self._template, self._experts_by_matrix, FILTERS_ARE_FIRST.is_of(version))

    def order_outside_layers(self, items: Sequence[str]) -> list[str] | None:
        """Return parameters outside the layers, and blocks, in registration order; None if one is unknown."""
        prefix = max(map(language_prefix, items), default="")
        ranks = {rank: item for item in items if (rank := self._rank_outside(item, prefix)) is not None}
        # For two towers with parts of the same name, the order of registration is unknown.
        return [item for _, item in sorted(ranks.items())] if len(ranks) == len(items) else None

    def _rank_outside(self, item: str, prefix: str) -> tuple[int, ...] | None:
        """Return the sort key of an item outside the layers, or in layers for multi-token prediction."""
        match = _PREDICTION.match(item.removeprefix(prefix))
        if match is None:
            rank = _rank_among_known(item, prefix)
            return None if rank is None else (rank,)
        number = int(match[1])
        suffix = match[2]
        if not suffix.startswith(f"{_INNER}."):
            return (_OUTSIDE_LAYERS["mtp"], number, _AROUND[suffix]) if suffix in _AROUND else None
        inner = self._key(suffix.removeprefix(f"{_INNER}."))
        return None if inner is None else (_OUTSIDE_LAYERS["mtp"], number, _AROUND[_INNER], *inner)

    def order_in_layer(self, layer: Layer, suffixes: Sequence[str]) -> list[str] | None:
        """Return the suffixes of one layer in registration order; None if one is unknown."""
        keys = [self._key(suffix) for suffix in suffixes]
        keyed = [(key, suffix) for key, suffix in zip(keys, suffixes, strict=True) if key is not None]
        return [suffix for _, suffix in sorted(keyed)] if len(keyed) == len(suffixes) else None

    def _key(self, suffix: str) -> tuple[int, ...] | None:
        name = parse(suffix)
        if name.experts != "mlp.experts" or name.expert is None:
            rank = self._rank.get(suffix)
            return None if rank is None else (rank,)
        matrices = _both("linear_fc1", "linear_fc2")
        if name.rest not in matrices:
            return None
        number = name.expert
        matrix = matrices.index(name.rest)
        # Grouped experts register weight0, bias0, weight1, ... of linear_fc1, then of linear_fc2; sequential experts
        # register each expert's own two linears (moe/experts.py; measured, 0.19.2).
        order = (matrix // 2, number, matrix % 2) if self._experts_by_matrix else (number, matrix)
        return (self._rank["experts"], *order)


LOCAL = KnownOrder("the local layer spec", _LOCAL, experts_by_matrix=False)
LOCAL_GROUPED = KnownOrder("the local layer spec, grouped experts", _LOCAL, experts_by_matrix=True)
TRANSFORMER_ENGINE = KnownOrder("the Transformer Engine layer spec", _TRANSFORMER_ENGINE, experts_by_matrix=True)
TRANSFORMER_ENGINE_SEQUENTIAL = KnownOrder(
    "the Transformer Engine layer spec, sequential experts", _TRANSFORMER_ENGINE, experts_by_matrix=False
)


class ObservedOrder:
    """The order in which a live model registered its parameters, collected from all ranks by layer."""

    def __init__(self, label: str, registered: Iterable[Sequence[str]]) -> None:
        """`registered`: model-space names in registration order, one sequence for each model chunk."""
        self.label = label
        self._layers: dict[Layer, dict[str, int]] = {}
        self._frame: list[str] = []
        for names in registered:
            seen: dict[str, None] = {}
            for name in names:
                layer, suffix = split_layer(name)
                if layer is not None:
                    ranks = self._layers.setdefault(layer, {})
                    ranks.setdefault(suffix, len(ranks))
                    seen.setdefault(layer.block)
                else:
                    # The last stage of a tied model has a copy of the embedding in place of its output layer.
                    is_copy = is_word_embeddings(name) and any(map(is_language_block, seen))
                    seen.setdefault(output_layer_of(name) if is_copy else name)
            self._insert(seen)

    def _insert(self, items: Iterable[str]) -> None:
        """Insert a chunk's items, each after its predecessor in the chunk."""
        after = 0
        for item in items:
            if item not in self._frame:
                self._frame.insert(after, item)
            after = self._frame.index(item) + 1

    def order_outside_layers(self, items: Sequence[str]) -> list[str] | None:
        """Return parameters outside the layers, and blocks, in registration order; None if one is unknown."""
        frame = self._frame.copy()
        for item in items:
            if item not in frame and is_output_layer(item):  # the observed model may have tied embeddings
                alike = [seen for seen in frame if language_prefix(seen) == language_prefix(item)]
                bias = item.replace(".weight", ".bias")
                frame.insert(frame.index(bias) if bias in frame else frame.index(alike[-1]) + 1 if alike else 0, item)
        return [item for item in frame if item in items] if {*frame} >= {*items} else None

    def order_in_layer(self, layer: Layer, suffixes: Sequence[str]) -> list[str] | None:
        """Return the suffixes of one layer in registration order; None if one is unknown."""
        ranks = self._layers.get(layer, {})
        return sorted(suffixes, key=ranks.__getitem__) if all(suffix in ranks for suffix in suffixes) else None


def filters_first(names: Sequence[str]) -> bool | None:
    """Return whether mixers register filters first, by names in registration order; None without any."""
    in_mixers = [name.rpartition("mixer.")[2] for name in names if ".mixer." in name]
    of_filters = (name.startswith("conv1d.") for name in in_mixers)
    others = {"dt_bias"} & {*in_mixers}
    return next(of_filters) if others else None


def known_orders(arguments: JobArguments) -> list[KnownOrder]:
    """Return the known orders; the order that fits the checkpoint's own arguments comes first."""
    local = [LOCAL, LOCAL_GROUPED]
    engine = [TRANSFORMER_ENGINE, TRANSFORMER_ENGINE_SEQUENTIAL]
    if arguments.num_experts and not arguments.moe_grouped_gemm:
        engine.reverse()
    elif arguments.moe_grouped_gemm:
        local.reverse()
    orders = [*local, *engine] if arguments.transformer_impl == "local" else [*engine, *local]
    return [*orders, *(order.order_of_version(OLDEST) for order in orders if is_hybrid(arguments))]


def registration_order(names: Iterable[str], order: ParameterOrder, tied_copy: bool = False) -> list[str] | None:
    """Return all parameters of one model chunk in registration order.

    Args:
        names: model-space names of the chunk's parameters.
        order: the source of the order within a layer.
        tied_copy: whether the chunk registers the word embeddings as its output layer (tied, last pipeline stage).

    Returns:
        None if the source lacks some parameter.
    """
    layers: dict[str, dict[int, list[str]]] = {}
    outside: list[str] = []
    for name in names:
        layer, suffix = split_layer(name)
        if layer is not None:
            layers.setdefault(layer.block, {}).setdefault(layer.number, []).append(suffix)
        else:
            outside.append(output_layer_of(name) if tied_copy and is_word_embeddings(name) else name)
    frame = order.order_outside_layers([*outside, *layers])
    if frame is None:
        return None
    result: list[str] = []
    for item in frame:
        for number, unordered in sorted(layers.get(item, {}).items()):
            suffixes = order.order_in_layer(Layer(item, number), unordered)
            if suffixes is None:
                return None
            result += [layer_name(Layer(item, number), suffix) for suffix in suffixes]
        if item not in layers:
            result.append(word_embeddings_of(item) if tied_copy and is_output_layer(item) else item)
    return result
