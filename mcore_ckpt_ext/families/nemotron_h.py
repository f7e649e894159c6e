"""Nemotron-H and Nemotron 3.

Each layer is a Mamba mixer, attention, an MLP or experts; a pattern gives the kind of each.

Sources: megatron/core/ssm/mamba_mixer.py and models/hybrid/ (core_v0.12.1 to 0.19.2), which stores the rows of
`in_proj` and `conv1d` in parts with separate keys; transformers/models/nemotron_h (5.23);
nemotronh/nemotron_h_bridge.py of
Megatron-Bridge (commit 067f987d).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar

from typing_extensions import override

from mcore_ckpt_ext.families.attention_settings import head_size, query_groups
from mcore_ckpt_ext.families.common_settings import NO_BIASES, RMS_NORM, TRAINING, tied_embeddings
from mcore_ckpt_ext.families.config_checks import Config, contradictory, unrepresentable
from mcore_ckpt_ext.families.deepseek import grouped_choice, normalized_sigmoids, scaled_gates
from mcore_ckpt_ext.families.family import Condition, Family, Piece, Rule, untied
from mcore_ckpt_ext.families.rows import KEY, QUERY, VALUE
from mcore_ckpt_ext.families.settings import (
    CheckedKeys,
    Constant,
    Custom,
    Forbidden,
    Implies,
    Mapped,
    Nullable,
    Requires,
    Setting,
    Size,
)
from mcore_ckpt_ext.job.arguments.run import HYBRID_SPECS
from mcore_ckpt_ext.job.model_arguments import ModelArguments
from mcore_ckpt_ext.layout.parameter_parts import rows_of_mixer

MIXER = "M"
ATTENTION = "*"
DENSE = "-"
EXPERTS = "E"
# Values of `layers_block_type`, in current and former releases of transformers.
_KINDS = {"linear_attention": MIXER, "mamba": MIXER, "full_attention": ATTENTION, "attention": ATTENTION,
          "mlp": DENSE, "moe": EXPERTS}  # fmt: skip
_OURS = "decoder.layers.{layer}"
_THEIRS = "backbone.layers.{layer}"
_LEAST_STEP = 0.001
_HEAD = 128
_EPSILON = 1e-5  # fixed in the norms of Megatron's mixers


def pattern_of(arguments: ModelArguments) -> str:
    """Return a letter for each layer, without Megatron's marks for pipeline stages and MTP layers."""
    pattern = arguments.get("hybrid_layer_pattern") or arguments.get("hybrid_override_pattern") or ""
    return str(pattern).partition("/")[0].replace("|", "")


def _is(kind: str) -> Condition:
    return lambda arguments, layer: pattern_of(arguments)[layer : layer + 1] == kind


def _has_latents(arguments: ModelArguments, layer: int) -> bool:
    return _is(EXPERTS)(arguments, layer) and bool(arguments.get("moe_latent_size"))


def _pieces_in_parts(*names: str) -> Callable[[ModelArguments], list[Piece]]:
    return lambda arguments: [(f".{name}", 0, rows_of_mixer(arguments)[name]) for name in names]


def _rules(kind: str, names: dict[str, str], **more: Any) -> tuple[Rule, ...]:
    return tuple(
        Rule(f"{_THEIRS}.{theirs}", f"{_OURS}.{ours}", where=_is(kind), **more) for theirs, ours in names.items()
    )


_EXPERT = "mlp.experts.experts.{expert}"
RULES = (
    Rule("backbone.embeddings.weight", "embedding.word_embeddings.weight"),
    *_rules(MIXER, {"norm.weight": "mixer.in_proj.layer_norm_weight", "mixer.dt_bias": "mixer.dt_bias",
                    "mixer.norm.weight": "mixer.norm.weight", "mixer.out_proj.weight": "mixer.out_proj.weight"}),
    *_rules(MIXER, {"mixer.A_log": "mixer.A_log", "mixer.D": "mixer.D"}, keeps_dtype=True),
    *_rules(MIXER, {"mixer.in_proj.weight": "mixer.in_proj.weight"}, pieces=_pieces_in_parts("z", "x", "B", "C", "dt")),
    *_rules(MIXER, {f"mixer.conv1d.{leaf}": f"mixer.conv1d.{leaf}" for leaf in ("weight", "bias")},
            pieces=_pieces_in_parts("x", "B", "C")),
    *_rules(ATTENTION, {"norm.weight": "self_attention.linear_qkv.layer_norm_weight",
                        "mixer.o_proj.weight": "self_attention.linear_proj.weight"}),
    *(rule for letter, rows in (("q", QUERY), ("k", KEY), ("v", VALUE))
      for rule in _rules(ATTENTION, {f"mixer.{letter}_proj.weight": "self_attention.linear_qkv.weight"}, rows=rows)),
    *_rules(DENSE, {"norm.weight": "mlp.linear_fc1.layer_norm_weight", "mixer.up_proj.weight": "mlp.linear_fc1.weight",
                    "mixer.down_proj.weight": "mlp.linear_fc2.weight"}),
    *_rules(EXPERTS, {"norm.weight": "pre_mlp_layernorm.weight", "mixer.gate.weight": "mlp.router.weight",
                      "mixer.experts.{expert}.up_proj.weight": f"{_EXPERT}.linear_fc1.weight",
                      "mixer.experts.{expert}.down_proj.weight": f"{_EXPERT}.linear_fc2.weight",
                      "mixer.shared_experts.up_proj.weight": "mlp.shared_experts.linear_fc1.weight",
                      "mixer.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight"}),
    *_rules(EXPERTS, {"mixer.gate.e_score_correction_bias": "mlp.router.expert_bias"}, keeps_dtype=True),
    *(Rule(f"{_THEIRS}.mixer.{name}.weight", f"{_OURS}.mlp.{name}.weight", where=_has_latents)
      for name in ("fc1_latent_proj", "fc2_latent_proj")),
    Rule("backbone.norm_f.weight", "decoder.final_norm.weight"),
    Rule("lm_head.weight", "output_layer.weight", where=untied),
)  # fmt: skip


def _pattern_in(config: Config) -> str:
    """Return the pattern as transformers does: a list has precedence over it."""
    kinds = config.get("layers_block_type") or config.get("layer_types")
    pattern = config.get("hybrid_override_pattern")
    letters = pattern if kinds is None else "".join(_KINDS.get(kind, "?") for kind in kinds)
    if not letters or {*letters} - {*_KINDS.values()} or (pattern and pattern != letters):
        both = f"{pattern}, and {letters} in layers_block_type" if pattern and kinds else kinds or pattern
        raise unrepresentable("hybrid_override_pattern", both, "M, *, - or E for each layer")
    return str(letters)


def _layers() -> Setting:
    def to_arguments(config: Config) -> dict[str, Any]:
        pattern = _pattern_in(config)
        return {"hybrid_layer_pattern": pattern, "num_layers": len(pattern)}

    def why_not(arguments: ModelArguments) -> list[str]:
        pattern = pattern_of(arguments)
        is_valid = len(pattern) == arguments.num_layers and not {*pattern} - {*_KINDS.values()}
        return [] if is_valid else [f"no hybrid_layer_pattern of M, *, - and E, but {pattern!r}"]

    return Custom(
        ("hybrid_override_pattern", "layers_block_type", "layer_types", "num_hidden_layers"),
        lambda arguments: {
            "hybrid_override_pattern": pattern_of(arguments), "num_hidden_layers": arguments.num_layers,
        },
        to_arguments, why_not,
        expressed=("hybrid_layer_pattern", "hybrid_override_pattern"),
    )  # fmt: skip


def mixer_heads(key: str, default: int) -> Setting:
    """Return the setting of a mixer's number of heads; `default` is that of the class."""
    return Custom(
        (key,),
        lambda arguments: {key: rows_of_mixer(arguments)["dt"]},
        lambda config: {"mamba_num_heads": config.get(key, default)},
        expressed=("mamba_num_heads",),
    )


def _epsilon() -> Setting:
    key = "layer_norm_epsilon"
    name = "layernorm_epsilon"

    def to_arguments(config: Config) -> dict[str, Any]:
        if config.get(key, _EPSILON) != _EPSILON and MIXER in _pattern_in(config):
            raise unrepresentable(key, config[key], f"{_EPSILON}, which the norms in Megatron's mixers have")
        return {name: config.get(key, _EPSILON)}

    def why_not(arguments: ModelArguments) -> list[str]:
        odd = arguments.layernorm_epsilon != _EPSILON and MIXER in pattern_of(arguments)
        return [f"{name} is {arguments.layernorm_epsilon}, and {_EPSILON} in mixers"] if odd else []

    return Custom((key,), lambda arguments: {key: arguments.layernorm_epsilon}, to_arguments, why_not)


def _check_older_head_size(config: Config) -> None:
    """Check `attention_head_dim` of Nemotron-H 56B; transformers only reads `head_dim`."""
    key = "attention_head_dim"
    if config.get(key, size := config.get("head_dim", _HEAD)) != size:
        raise contradictory(key, config[key], f"{size} as head_dim")


class WithExperts(Setting):
    """Settings that only apply if the pattern has experts."""

    def __init__(self, *settings: Setting) -> None:
        self._settings = settings
        self.keys = [key for setting in settings for key in setting.keys]
        self.expresses = ["num_experts", *(name for setting in settings for name in setting.expresses)]

    @override
    def config(self, arguments: ModelArguments) -> dict[str, Any]:
        has = EXPERTS in pattern_of(arguments)
        return (
            {key: value for setting in self._settings for key, value in setting.config(arguments).items()}
            if has
            else {}
        )

    @override
    def arguments(self, config: Config) -> dict[str, Any]:
        has = EXPERTS in _pattern_in(config)
        return (
            {name: value for setting in self._settings for name, value in setting.arguments(config).items()}
            if has
            else {}
        )

    @override
    def mismatches(self, arguments: ModelArguments) -> list[str]:
        if EXPERTS not in pattern_of(arguments):
            return []
        return [reason for setting in self._settings for reason in setting.mismatches(arguments)]


class NemotronH(Family):
    """No positions; squared ReLU in the MLP; experts are chosen by a sigmoid and a bias."""

    model_type = "nemotron_h"
    architecture = "NemotronHForCausalLM"
    needs_engine = True
    bridge_provider = "mamba.mamba_provider.MambaModelProvider"  # 0.6.2 has no class of its own
    bridge_lacks = ("rope_scaling", "rope_scaling_factor")
    rules = RULES
    read_rules = tuple(
        Rule(f"{_THEIRS}.mixer.experts.{theirs}", f"{_OURS}.{_EXPERT}.{ours}.weight", where=_is(EXPERTS))
        for theirs, ours in (("up_proj", "linear_fc1"), ("down_proj", "linear_fc2"))
    )
    left_out = (r"^mtp\.",)
    # Keys about initialization and speed, and keys that neither transformers nor the released code reads; attention has
    # no positions even if there are keys for RoPE.
    without_effect: ClassVar[Sequence[str]] = (
        "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype", "expand", "chunk_size", "time_step_floor",
        "time_step_limit", "time_step_max", "time_step_min", "time_step_rank", "moe_shared_expert_overlap",
        "residual_in_fp32", "rescale_prenorm_residual", "rms_norm_eps", "norm_eps", "num_nextn_predict_layers",
        "mtp_layers_block_type", "mtp_hybrid_override_pattern", "n_shared_experts", "mlp_only_layers",
        "keep_mtp_spec_in_bf16", "mtp_use_repeated_layer", "rope_theta", "partial_rotary_factor",
    )  # fmt: skip
    settings = (
        _layers(), Size("hidden_size", "hidden_size", 4096),
        Size("num_attention_heads", "num_attention_heads", 32, counted=True),
        Size("intermediate_size", "ffn_hidden_size", 21504), query_groups(8), head_size(always=True, default=_HEAD),
        CheckedKeys("attention_head_dim", check=_check_older_head_size),
        Size("max_position_embeddings", "max_position_embeddings", 4096), Size("vocab_size", "vocab_size", 131072),
        tied_embeddings(by_default=False), *TRAINING, Mapped("hidden_dropout", "hidden_dropout", 0.0),
        RMS_NORM, _epsilon(),
        mixer_heads("mamba_num_heads", 128), Size("mamba_head_dim", "mamba_head_dim", 64),
        Size("n_groups", "mamba_num_groups", 8),
        Size("ssm_state_size", "mamba_state_dim", 128), Constant("conv_kernel", 4, {}),
        Constant("use_conv_bias", True, {}), Constant("mamba_hidden_act", "silu", {}),
        Constant("mamba_proj_bias", False, {}),
        Constant("mlp_hidden_act", "relu2", {"squared_relu": True, "swiglu": False}),
        Constant("attention_bias", False, NO_BIASES),
        Constant("mlp_bias", False, {}), Constant("use_bias", False, {}), Forbidden("sliding_window"),
        Requires({"position_embedding_type": "none"}), Implies({"is_hybrid_model": True}),
        WithExperts(
            Size("n_routed_experts", "num_experts", 8, counted=True),
            Size("num_experts_per_tok", "moe_router_topk", 2),
            Size("moe_intermediate_size", "moe_ffn_hidden_size", 7688),
            Size("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", 7688),
            Nullable("moe_latent_size", "moe_latent_size"),
            grouped_choice(1, 1), normalized_sigmoids(2), scaled_gates(1.0),
            Requires({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
        ),
    )  # fmt: skip

    @override
    def shape(self, name: str, arguments: ModelArguments) -> tuple[int, ...]:
        parts = rows_of_mixer(arguments)
        hidden = arguments.hidden_size
        whole, _, part = name.rpartition(".")
        if ".mixer." in name and part in parts:
            inner = {"in_proj.weight": (hidden,), "conv1d.weight": (1, 4), "conv1d.bias": ()}
            return (parts[part], *inner[whole.rpartition(".mixer.")[2]])
        latent = int(arguments.get("moe_latent_size") or 0)
        shapes = {
            "A_log": (parts["dt"],), "D": (parts["dt"],), "dt_bias": (parts["dt"],), "norm.weight": (parts["z"],),
            "out_proj.weight": (hidden, parts["z"]), "in_proj.layer_norm_weight": (hidden,),
        }  # fmt: skip
        if name == "decoder.final_norm.weight":
            return (hidden,)
        if (mixer_shape := shapes.get(name.rpartition(".mixer.")[2])) is not None and ".mixer." in name:
            return mixer_shape
        if "_latent_proj." in name:
            return (latent, hidden) if "fc1_" in name else (hidden, latent)
        shape = super().shape(name, arguments)
        if latent and ".experts.experts." in name:  # experts work on latents instead of hidden states
            other = prod(shape) // hidden
            return (other, latent) if "linear_fc1" in name else (latent, other)
        return shape

    @override
    def notices(self, arguments: ModelArguments) -> list[str]:
        new, old = (f"--spec {' '.join(spec)}" for spec in HYBRID_SPECS[:2])
        notices = [
            f"pretrain_hybrid.py, not pretrain_gpt.py, trains it, with {new}; up to 0.17 pretrain_mamba.py, {old}"
        ]
        if MIXER in pattern_of(arguments):
            notices.append(
                f"transformers limits the time steps of mixers to time_step_min ({_LEAST_STEP} by default) or more, "
                "Megatron does not: for smaller time steps the two compute differently"
            )
        return notices

    @override
    def bridge_fields(self, arguments: ModelArguments) -> dict[str, Any]:
        names = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads")
        return {
            "hybrid_override_pattern": pattern_of(arguments), **{name: arguments.value(name) for name in names},
        }  # fmt: skip
