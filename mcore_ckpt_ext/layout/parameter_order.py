"""The order in which a model chunk registers its parameters: the known specs, and what a live model shows.

The order decides where each parameter lies in the gradient buffer, and no checkpoint records it. Sources:
`megatron/core/models/gpt/gpt_model.py` (embedding, decoder, output layer), `gpt_layer_specs.py` and
`transformer_layer.py` (submodules of a layer), `extensions/transformer_engine.py` (fused norm before the weight
of its linear); core_v0.7.0 to 0.19.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.model_space.names import OUTPUT_LAYER, WORD_EMBEDDINGS, in_layer, parse, split_layer

_BEFORE_LAYERS = (WORD_EMBEDDINGS, "embedding.position_embeddings.weight", "embedding.tokentype_embeddings.weight")
_AFTER_LAYERS = (
    "decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "decoder.final_norm.weight",  # GPT, hybrid models
    OUTPUT_LAYER, "output_layer.bias",
)  # fmt: skip


def _both(*modules: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for module in modules for name in ("weight", "bias"))


def _norm(module: str) -> tuple[str, ...]:
    return (f"{module}.layer_norm_weight", f"{module}.layer_norm_bias")


_QKV, _PROJ, _FC1, _FC2 = "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"
_QK_NORMS = _both(*(f"self_attention.{name}" for name in ("q_layernorm", "k_layernorm", "kv_layernorm")))
# Of latent attention (multi_latent_attention.py): queries are compressed, or not.
_LATENT = [
    f"self_attention.{name}"
    for name in ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
]
_EXPERTS = ("experts",)
_SHARED = _both("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2") + ("mlp.shared_experts.gate_weight",)

# Parameters of one decoder layer in registration order, by their sharded-key suffix. "experts" stands for all
# parameters of all experts. The local spec stores its separate norms under the fused keys of the other one.
_LOCAL = (
    *_norm(_QKV), *_both("input_layernorm", _PROJ, _QKV, *_LATENT), *_QK_NORMS,
    *_norm(_FC1), *_both("pre_mlp_layernorm", _FC1, _FC2, "mlp.router"), *_EXPERTS, *_SHARED,
)  # fmt: skip
_TRANSFORMER_ENGINE = (
    *_both("input_layernorm", _PROJ),
    *(name for linear in (_QKV, *_LATENT) for name in (*_norm(linear), *_both(linear))), *_QK_NORMS,
    *_both("pre_mlp_layernorm"), *_norm(_FC1), *_both(_FC1, _FC2, "mlp.router"), *_EXPERTS, *_SHARED,
)  # fmt: skip


class ParameterOrder(Protocol):
    """A witness of the registration order."""

    @property
    def label(self) -> str:
        """For messages."""

    def arrange(self, layer: int, suffixes: Sequence[str]) -> list[str] | None:
        """The suffixes of one layer in registration order; None if this witness does not know them all."""


class KnownOrder:
    """The order of one of Megatron's own GPT layer specs."""

    def __init__(self, label: str, template: Iterable[str], experts_by_matrix: bool) -> None:
        self.label = label
        self._rank = {suffix: position for position, suffix in enumerate(template)}
        self._experts_by_matrix = experts_by_matrix

    def arrange(self, layer: int, suffixes: Sequence[str]) -> list[str] | None:
        """The suffixes of one layer in registration order; None if this witness does not know them all."""
        keys = [self._key(suffix) for suffix in suffixes]
        known = [(key, suffix) for key, suffix in zip(keys, suffixes, strict=True) if key is not None]
        return [suffix for _, suffix in sorted(known)] if len(known) == len(suffixes) else None

    def _key(self, suffix: str) -> tuple[int, ...] | None:
        name = parse(suffix)
        if name.experts != "mlp.experts" or name.expert is None:
            rank = self._rank.get(suffix)
            return None if rank is None else (rank,)
        matrices = _both("linear_fc1", "linear_fc2")
        if name.rest not in matrices:
            return None
        number, matrix = name.expert, matrices.index(name.rest)
        # Grouped experts register weight0, bias0, weight1, ... of linear_fc1, then of linear_fc2; sequential
        # experts register each expert's own two linears (moe/experts.py; measured, 0.19.2).
        order = (matrix // 2, number, matrix % 2) if self._experts_by_matrix else (number, matrix)
        return (self._rank["experts"], *order)


LOCAL = KnownOrder("the local layer spec", _LOCAL, experts_by_matrix=False)
LOCAL_GROUPED = KnownOrder("the local layer spec, grouped experts", _LOCAL, experts_by_matrix=True)
TRANSFORMER_ENGINE = KnownOrder("the Transformer Engine layer spec", _TRANSFORMER_ENGINE, experts_by_matrix=True)
TRANSFORMER_ENGINE_SEQUENTIAL = KnownOrder(
    "the Transformer Engine layer spec, sequential experts", _TRANSFORMER_ENGINE, experts_by_matrix=False
)


class WitnessedOrder:
    """The order in which a live model registered its parameters, gathered from all ranks by layer."""

    def __init__(self, label: str, registered: Iterable[Sequence[str]]) -> None:
        """`registered`: model-space names in registration order, one sequence for each model chunk."""
        self.label = label
        self._layers: dict[int, dict[str, int]] = {}
        for names in registered:
            for name in names:
                layer, suffix = split_layer(name)
                if layer is not None:
                    ranks = self._layers.setdefault(layer, {})
                    ranks.setdefault(suffix, len(ranks))

    def arrange(self, layer: int, suffixes: Sequence[str]) -> list[str] | None:
        """The suffixes of one layer in registration order; None if this witness does not know them all."""
        ranks = self._layers.get(layer, {})
        return sorted(suffixes, key=ranks.__getitem__) if all(suffix in ranks for suffix in suffixes) else None


def known_orders(arguments: JobArguments) -> list[ParameterOrder]:
    """The known orders; the one that the checkpoint's own arguments name comes first."""
    local = [LOCAL, LOCAL_GROUPED]
    engine = [TRANSFORMER_ENGINE, TRANSFORMER_ENGINE_SEQUENTIAL]
    if arguments.num_experts and not arguments.moe_grouped_gemm:
        engine.reverse()
    elif arguments.moe_grouped_gemm:
        local.reverse()
    return [*local, *engine] if arguments.transformer_impl == "local" else [*engine, *local]


def registration_order(names: Iterable[str], order: ParameterOrder, tied_copy: bool = False) -> list[str] | None:
    """All parameters of one model chunk in registration order.

    Args:
        names: model-space names of the chunk's parameters.
        order: the witness of the order inside a layer.
        tied_copy: the chunk registers the word embeddings as its output layer (tied, last pipeline stage).

    Returns:
        None when the witness does not know some parameter.
    """
    layers: dict[int, list[str]] = {}
    outside: list[str] = []
    for name in names:
        layer, suffix = split_layer(name)
        if layer is None:
            outside.append(name)
        else:
            layers.setdefault(layer, []).append(suffix)
    before = [name for name in _BEFORE_LAYERS if name in outside and not (tied_copy and name == WORD_EMBEDDINGS)]
    after = [name for name in _AFTER_LAYERS if name in outside] + [WORD_EMBEDDINGS] * tied_copy
    if len(before) + len(after) != len(outside):
        return None
    result = before
    for layer in sorted(layers):
        suffixes = order.arrange(layer, layers[layer])
        if suffixes is None:
            return None
        result += [in_layer(layer, suffix) for suffix in suffixes]
    return result + after
