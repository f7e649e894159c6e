"""Rotary position embeddings (RoPE) in `config.json` and in Megatron's arguments.

Sources: transformers/modeling_rope_utils.py (5.23); megatron/core/models/common/embeddings/rotary_pos_embedding.py and
yarn_rotary_pos_embedding.py (core_v0.12.1 to 0.19.2). Non-latent attention supports YaRN since 0.19
(`--position-embedding-type yarn`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from math import log
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import quantity, shorten
from mcore_ckpt_ext.families.config_checks import Config, contradictory, mismatches, null_value, unrepresentable
from mcore_ckpt_ext.families.settings import Setting
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_ORIGINAL = "original_max_position_embeddings"
KEYS = ("rope_parameters", "rope_theta", "rope_scaling", _ORIGINAL)
_NESTED = ("rope_scaling", "rope_parameters")
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, _ORIGINAL: 8192}
_PART = "partial_rotary_factor"
OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Keys that only have an effect on texts with images."""
# YaRN without latent attention: Megatron's arguments by Hugging Face's keys.
_YARN = {
    "factor": "rotary_scaling_factor",
    _ORIGINAL: "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "truncate": "yarn_correction_range_round_to_int",
}
_MSCALES = ("mscale", "mscale_all_dim")
# Keys that each kind of scaling may have, in addition to those of all kinds; `finetuned` has no effect
# (`LlamaYaRNScaledRotaryEmbedding` of modeling_llama_together_yarn.py, the code of Yarn-Llama-2).
_ALWAYS = {"rope_theta", "rope_type", "partial_rotary_factor"}
_OF_KIND = {
    "default": {"factor"},
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", *_LLAMA_3},
    "yarn": {"attention_factor", "finetuned", *_YARN, *_MSCALES},
}
_EXPRESSED = (
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor",
    *_YARN.values(),
    *_MSCALES,
)


def rope_parameters(
    config: Config, theta: float = 10000.0, ignored: Collection[str] = (), *, dynamic: bool = False
) -> dict[str, Any]:
    """Return the keys of RoPE in `config.json`, with `rope_theta` and `rope_type`, without null keys.

    Up to transformers 4 they are in `rope_theta` and `rope_scaling` (with `type` before 4.43), since 5 in
    `rope_parameters`. If both exist, transformers silently uses one of them (`convert_rope_params_to_dict`); here they
    must agree. Keys in `ignored` are left out. If `dynamic`, that kind is read as `default`, to which it is equal up to
    `max_position_embeddings` (`_compute_dynamic_ntk_parameters`).

    Raises:
        UnsupportedCheckpointError: Megatron has no arguments for a kind of scaling or one of its keys, or keys
            contradict each other.
    """
    given = {key: config[key] for key in _NESTED if config.get(key)} or {"rope_parameters": {}}
    parameters = [_parameters(key, value, config, theta, ignored) for key, value in given.items()]
    if parameters[0] != parameters[-1]:
        raise contradictory("rope_scaling", parameters[0], f"{parameters[-1]} in rope_parameters")
    rope_keys = parameters[0]
    kind = str(rope_keys["rope_type"])
    if kind not in _OF_KIND or (kind == "dynamic" and not dynamic):
        expected = ", ".join(kind for kind in _OF_KIND if kind != "dynamic" or dynamic)
        raise unrepresentable("rope_scaling", _why_not(rope_keys), expected)
    if strange := sorted(rope_keys.keys() - _ALWAYS - _OF_KIND[kind]):
        raise unrepresentable(f"rope_scaling of type {kind}", ", ".join(strange), ", ".join(sorted(_OF_KIND[kind])))
    return {**rope_keys, "rope_type": "default"} if kind == "dynamic" else rope_keys


def _why_not(scaling: Mapping[str, Any]) -> str:
    """Describe a kind of scaling that Megatron does not have, with the reason for LongRoPE.

    Source: `_compute_longrope_parameters` of modeling_rope_utils.py. Only Megatron's `YarnRotaryEmbedding` multiplies
    cosine and sine; up to the development head of August 2026 it ignores `rotary_percent`.
    """
    kind = str(scaling["rope_type"])
    if kind not in ("longrope", "su"):
        return shorten(repr(scaling))
    factors = scaling.get("short_factor") or []
    scaled = [factor for factor in factors if factor != 1]
    if scaled:
        frequencies = quantity(len(factors), "frequency", "frequencies")
        return f"{kind}, whose short_factor scales {len(scaled)} of {frequencies} each in its own way"
    if scaling.get(_PART, 1.0) != 1.0:
        return (
            f"{kind}, whose attention factor multiplies the part of a head that is rotated, {scaling[_PART]}: "
            "Megatron's YaRN, which has such a factor, rotates whole heads"
        )
    return f"{kind}, whose frequencies change with the length of the text"


def _parameters(key: str, given: Any, config: Config, theta: float, ignored: Collection[str]) -> dict[str, Any]:
    """Return the parameters in one of the two keys, completed by other keys of `config.json`.

    It may also have the original length: transformers 5 prefers that (`standardize_rope_params`), and 4 ignores it.
    """
    if not isinstance(given, Mapping):
        raise unrepresentable(key, shorten(repr(given)), "keys with values, or null")
    parameters = {name: value for name, value in given.items() if value is not None and name not in ignored}
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    scaled = parameters["rope_type"] in ("llama3", "yarn")
    for name in ("rope_theta", _PART, *([_ORIGINAL] if scaled else [])):
        if (other := config.get(name)) is not None and parameters.setdefault(name, other) != other:
            raise contradictory(name, other, f"{parameters[name]} among {key}")
    if parameters.setdefault("rope_theta", config.get("rope_theta", theta)) is None:
        raise null_value("rope_theta", theta)
    return parameters


def base_of(found: Mapping[str, Any]) -> float:
    """Return the base, as an integer if possible: `--rotary-base` accepts no other number."""
    base = found["rope_theta"]
    return int(base) if base == int(base) else base


@dataclass
class Rope(Setting):
    """The setting of RoPE: unscaled, interpolated (`linear`), scaled as in Llama 3, or by YaRN.

    Frequencies that change for texts longer than `max_position_embeddings` (`dynamic`) are read as unscaled ones.

    Args:
        theta: default of `rope_theta` in Hugging Face's class.
        partial: default for the part of a head that is rotated; None if the family always rotates whole heads.
        interleaved: adjacent elements are rotated together, instead of halves.
        width: key for the size of the rotated part, if any. vLLM and Megatron-Bridge 0.6.2 read no other of MiniMax-M2
            (`rotary_dim` in their minimax_m2.py and minimax_m2_bridge.py).
        scaling: default scaling of the class.
        ignored: further keys that have no effect.
    """

    theta: float = 10000.0
    _: KW_ONLY
    partial: float | None = None
    interleaved: bool = False
    width: str = ""
    scaling: Mapping[str, Any] | None = None
    ignored: Collection[str] = ()

    def __post_init__(self) -> None:
        self.keys = (*KEYS, _PART, *([self.width] if self.width else []))
        self.expresses = _EXPRESSED

    @override
    def config(self, arguments: ModelArguments) -> dict[str, Any]:
        unscaled = None if self.scaling is None else {"rope_type": "default"}  # then no scaling must be written, too
        part = {} if self.partial is None else {_PART: arguments.rotary_percent}
        if self.width:
            part[self.width] = round(arguments.rotary_percent * arguments.kv_channels)
        scaling = _scaling_to_config(arguments) or unscaled
        return {"rope_theta": float(arguments.rotary_base), "rope_scaling": scaling, **part}

    @override
    def arguments(self, config: Config) -> dict[str, Any]:
        parameters = self._parameters(config)
        kind = parameters["rope_type"]
        part = parameters.get(_PART, self.partial or 1.0)
        if part != 1.0 and (self.partial is None or kind != "default"):
            raise unrepresentable(_PART, part, "1.0")
        return {
            "position_embedding_type": "rope",
            "rotary_base": base_of(parameters),
            "use_rope_scaling": False,
            "rotary_percent": part,
            "rotary_interleaved": self.interleaved,
            **_scaling_to_arguments(kind, parameters, config),
        }

    def _parameters(self, config: Config) -> dict[str, Any]:
        if self.scaling is not None and not config.get("rope_scaling") and config.get("rope_parameters") is None:
            config = {**config, "rope_scaling": self.scaling}
        parameters = rope_parameters(config, self.theta, self.ignored, dynamic=True)
        if self.partial is not None and _PART not in parameters and _PART in config:
            raise null_value(_PART, self.partial)
        if self.width and (rotated := config.get(self.width)) is not None:
            size = config["head_dim"]
            if round(parameters.setdefault(_PART, rotated / size) * size) != rotated:
                raise contradictory(self.width, rotated, f"{_PART} {parameters[_PART]} of {size}")
        return parameters

    @override
    def mismatches(self, arguments: ModelArguments) -> list[str]:
        kind = arguments.position_embedding_type
        scaled = kind == "yarn" or arguments.use_rope_scaling or arguments.rotary_seq_len_interpolation_factor
        whole = {"rotary_percent": 1.0} if self.partial is None or scaled else {}
        others = [] if kind in ("rope", "yarn") else [f"position_embedding_type is {kind}"]
        return mismatches({"rotary_interleaved": self.interleaved, **whole}, arguments) + others


@dataclass
class UnscaledRope(Rope):
    """The setting of RoPE for a class that supports none of Megatron's scalings."""

    @override
    def arguments(self, config: Config) -> dict[str, Any]:
        if (kind := rope_parameters(config)["rope_type"]) != "default":
            raise unrepresentable("rope_scaling", f"{kind}, which the model's own class does not know", "default")
        return super().arguments(config)

    @override
    def mismatches(self, arguments: ModelArguments) -> list[str]:
        unscaled = {
            "position_embedding_type": "rope",
            "use_rope_scaling": False,
            "rotary_seq_len_interpolation_factor": None,
        }
        return [*dict.fromkeys(super().mismatches(arguments) + mismatches(unscaled, arguments))]


def _scaling_to_config(arguments: ModelArguments) -> dict[str, Any] | None:
    """Return `rope_scaling` for the arguments; None if they do not scale."""
    if arguments.position_embedding_type == "yarn":
        return _yarn_to_config(arguments)
    if arguments.use_rope_scaling:
        return {"rope_type": "llama3", "factor": float(arguments.rope_scaling_factor), **_LLAMA_3}
    if arguments.rotary_seq_len_interpolation_factor:
        return {"rope_type": "linear", "factor": float(arguments.rotary_seq_len_interpolation_factor)}
    return None


def _scaling_to_arguments(kind: str, scaling: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the arguments for a kind of scaling.

    Raises:
        UnsupportedCheckpointError: Megatron has no argument for a value.
    """
    if kind == "llama3":
        for key, value in _LLAMA_3.items():
            if scaling.get(key) != value:
                raise unrepresentable(f"rope_scaling {key}", scaling.get(key), f"{value}")
        return {"use_rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}
    if kind == "linear":
        if scaling["factor"] != int(scaling["factor"]):
            raise unrepresentable("rope_scaling factor", scaling["factor"], "a whole number, where it is linear")
        return {"rotary_seq_len_interpolation_factor": int(scaling["factor"])}
    if kind == "yarn":
        return {"position_embedding_type": "yarn", **_yarn_to_arguments(scaling, config)}
    return {}


_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}


def _yarn_to_config(arguments: ModelArguments) -> dict[str, Any]:
    settings = {key: arguments.value(name) for key, name in _YARN.items()}
    for key, usual in (*_BETAS.items(), ("truncate", True)):
        if settings[key] == usual:
            del settings[key]
    mscale = arguments.mscale
    all_dim = arguments.mscale_all_dim
    if mscale and all_dim:
        settings |= {"mscale": mscale, "mscale_all_dim": all_dim}
    elif (mscale, all_dim) != (1.0, 0.0):
        settings["attention_factor"] = concentration(float(settings["factor"]), mscale, all_dim)
    return {"rope_type": "yarn", **settings}


def _yarn_to_arguments(parameters: Mapping[str, Any], config: Config) -> dict[str, Any]:
    factor, original = yarn_lengths(parameters, config)
    mscale, all_dim = mscales(parameters, factor)
    return {
        "rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": original,
        **{_YARN[key]: float(parameters.get(key) or absent) for key, absent in _BETAS.items()},
        "yarn_correction_range_round_to_int": bool(parameters.get("truncate", True)),
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }


def yarn_lengths(found: Mapping[str, Any], config: Config) -> tuple[float, int]:
    """Return YaRN's factor and original number of positions; each may follow from the other."""
    positions = config["max_position_embeddings"]
    original = int(found.get(_ORIGINAL, positions))
    return float(found.get("factor", positions / original)), original


def concentration(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """Return Megatron's factor on cosine and sine (`_yarn_get_concentration_factor`)."""
    return _scale(factor, mscale) / _scale(factor, mscale_all_dim)


def _scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


def mscales(found: Mapping[str, Any], factor: float, *, latent: bool = False) -> tuple[float, float]:
    """Return Megatron's `mscale` and `mscale_all_dim` for Hugging Face's factor on cosine and sine.

    Hugging Face's factor is `attention_factor`, or follows from `mscale` and `mscale_all_dim`, or, if one of them is
    missing, from YaRN's factor alone. With `latent` attention, `mscale_all_dim` also scales the logits, unchanged.

    Raises:
        UnsupportedCheckpointError: no values of the arguments result in this factor.
    """
    mscale = found.get("mscale")
    all_dim = found.get("mscale_all_dim")
    attention_factor = found.get("attention_factor")
    if attention_factor is None and mscale and all_dim:
        return mscale, all_dim
    kept = float(all_dim or 0.0) if latent else 0.0
    attention_factor = _scale(factor, 1.0) if attention_factor is None else float(attention_factor)
    if attention_factor == concentration(factor, 1.0, kept):
        return 1.0, kept
    if factor <= 1:
        raise unrepresentable("rope_scaling attention_factor", attention_factor, "1.0 where the factor is 1 or less")
    return (attention_factor * _scale(factor, kept) - 1.0) / (0.1 * log(factor)), kept


def rope_notices(config: Config, arguments: ModelArguments) -> list[str]:
    """Return notices for a model whose RoPE changes its base for longer texts, or needs Megatron 0.19."""
    kinds = [given.get("rope_type", given.get("type")) for key in _NESTED if isinstance(given := config.get(key), dict)]
    notes = [exact_up_to(arguments, "changes the base of RoPE (dynamic scaling)")] if "dynamic" in kinds else []
    if arguments.position_embedding_type == "yarn":
        notes.append("--position-embedding-type yarn is of Megatron 0.19 and later")
    if arguments.rotary_seq_len_interpolation_factor:
        notes.append("--rotary-seq-len-interpolation-factor has an effect since pretrain_gpt.py of 0.19")
    return notes


def exact_up_to(arguments: ModelArguments, what: str) -> str:
    """Return the notice for a model whose own code differs from Megatron for longer texts.

    Args:
        arguments: arguments of the model.
        what: what the code does for longer texts.
    """
    return (
        f"its own code {what} for texts of more than {quantity(arguments.max_position_embeddings or 0, 'token')}, and "
        f"Megatron does not: train with --seq-length {arguments.max_position_embeddings} or less"
    )
