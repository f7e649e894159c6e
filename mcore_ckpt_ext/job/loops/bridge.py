"""Reads Megatron-Bridge's `run_config.yaml` as data, without importing the classes that it names.

Source: `save_checkpoint` and `load_checkpoint` of training/checkpointing.py, `ConfigContainer` of training/config.py;
megatron-bridge 0.2.1 to 0.6.0 and the development head of 22 August 2026. When it resumes, Bridge itself only reads
`model` (tensor and pipeline parallel size) and `checkpoint` (`save_optim`, `save_rng`, `fully_parallel_save`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from mcore_ckpt_ext.job.arguments.table import BRIDGE_FIELDS
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.loops.transformer import is_plain, model_arguments, name_of_object

RUN_CONFIG = "run_config.yaml"
"""The file in an iteration folder by which Megatron-Bridge recognizes its checkpoints."""
TRAIN_STATE = "train_state.pt"
"""The file in an iteration folder with the iteration and the number of consumed samples."""
LATEST_TRAIN_STATE = "latest_train_state.pt"
"""The newest `train_state.pt` in a run folder, which Megatron-Bridge prefers to Megatron's tracker file."""

COUNTED = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
"""Counts in `train_state.pt` that Megatron stores in its arguments (`TrainState`, training/state.py)."""

_GEMMA = re.compile(r"megatron\.bridge\.models\.gemma\.gemma_provider\.\w*Gemma\w*Provider\w*")
_GEMMA3 = re.compile(r"megatron\.bridge\.models\.gemma(_vl\.gemma3_vl|\.gemma3)_provider\.Gemma3\w*Provider")
_MOST_SCALAR = 1 << 40
_GEMMA2 = re.compile(r"megatron\.bridge\.models\.gemma\.gemma2_provider\.Gemma2\w*Provider\w*")
# For each section except `model`: its fields and the corresponding arguments.
_SECTIONS = {
    section: {name: argument for name, argument, field in BRIDGE_FIELDS if field.section == section}
    for section in dict.fromkeys(field.section for *_, field in BRIDGE_FIELDS if field.section != "model")
}
# Fields of Gemma's providers that are read under other names.
_GEMMA2_FIELDS = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
_GEMMA3_FIELDS = ("interleaved_attn_pattern",)
# Fields with the negated value of an argument.
_TURNED = {"save_optim": "no_save_optim", "save_rng": "no_save_rng"}


def job_arguments(content: Any, source: str) -> JobArguments:
    """Return the arguments in a `run_config.yaml`.

    Args:
        content: the parsed file.
        source: path of the file, for messages.

    Raises:
        ValueError: it is not such a file.
        UnreadableCheckpointError: an argument has a value that no job can have.
    """
    if not isinstance(content, Mapping) or not isinstance(content.get("model"), Mapping):
        raise ValueError("it has no section `model`")
    model = content["model"]
    inner = model.get("transformer")  # a model's configuration may contain that of its transformer
    arguments = model_arguments({**(inner if isinstance(inner, Mapping) else {}), **model})
    arguments = _with_gemma_fields(arguments, name_of_object(model) or "")
    if arguments.get("hybrid_layer_pattern") is None and isinstance(arguments.get("hybrid_override_pattern"), str):
        arguments["hybrid_layer_pattern"] = arguments["hybrid_override_pattern"]  # its name before Core 0.17
    for section in _SECTIONS:
        arguments |= section_arguments(section, _section(content, section))
    for name, argument in _TURNED.items():
        value = _section(content, "checkpoint").get(name)
        if isinstance(value, bool):
            arguments[argument] = not value
    dtype = name_of_object(_section(content, "optimizer").get("main_params_dtype"))
    if dtype is not None:
        arguments["main_params_dtype"] = dtype
    arguments |= _vocabulary(model, _section(content, "tokenizer"))
    if is_plain(model.get("seq_length")) and model.get("seq_length") is not None:
        arguments["seq_length"] = model["seq_length"]
        arguments.setdefault("max_position_embeddings", model["seq_length"])
    return JobArguments.of(arguments, source=source, is_complete=False)


def _with_gemma_fields(arguments: dict[str, Any], provider: str) -> dict[str, Any]:
    """Return the arguments with those that Gemma's providers name differently."""
    if _GEMMA3.fullmatch(provider):
        arguments = _without(arguments, _GEMMA3_FIELDS) | _gemma3_arguments(arguments)
    if _GEMMA2.fullmatch(provider):
        arguments = _without(arguments, _GEMMA2_FIELDS) | _gemma2_arguments(arguments)
    if _GEMMA.fullmatch(provider):
        arguments |= {"scaled_embeddings": True, **_gelu_of(arguments)}
    return arguments


def _without(fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _gemma3_arguments(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that Gemma 3's providers name differently (gemma/gemma3_provider.py, 0.6.2)."""
    arguments: dict[str, Any] = {"scaled_embeddings": True, "rope_scaling_factor": None, **_gelu_of(model)}
    bases, window, pattern = (model.get(name) for name in ("rotary_base", "window_size", "interleaved_attn_pattern"))
    if isinstance(bases, list) and len(bases) == 2:
        arguments |= {"rotary_base_local": bases[0], "rotary_base": bases[1]}
    if type(window) is int:
        arguments["window_size"] = [window - 1, 0]
    if isinstance(pattern, list) and len(pattern) == 2 and pattern[1] == 1:
        arguments["window_attn_skip_freq"] = pattern[0] + 1
    scaling = model.get("rope_scaling_factor")
    return {**arguments, "rotary_seq_len_interpolation_factor": None if scaling == 1 else scaling}


def _gelu_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the activation: approximated GELU unless the file has another function."""
    return {"swiglu": model.get("swiglu", False), "bias_gelu_fusion": model.get("bias_gelu_fusion", True)}


def _gemma2_arguments(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that Gemma 2's providers name differently.

    Source: gemma/gemma2_provider.py, 0.3.1 to 0.6.0.
    """
    scalar = model.get("query_pre_attn_scalar")
    scale = scalar**-0.5 if isinstance(scalar, (int, float)) and 0 < scalar < _MOST_SCALAR else None
    return {
        "scaled_embeddings": True,
        "softmax_scale": scale,
        **_gelu_of(model),
        "attention_softcap": model.get("attn_logit_softcapping"),
        "final_logit_softcap": model.get("final_logit_softcapping"),
    }


def section_arguments(section: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in the fields of a section whose values are plain."""
    names = _SECTIONS[section]
    return {names[name]: value for name, value in fields.items() if name in names and is_plain(value)}


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = content.get(name)
    return section if isinstance(section, Mapping) else {}


def _vocabulary(model: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of tokens, if the file distinguishes it from the number of embedding rows.

    A model with `should_pad_vocab` has it in `model.vocab_size`. Otherwise `model.vocab_size` is padded, and the
    tokenizer has the number of tokens.
    """
    tokens = model.get("vocab_size") if model.get("should_pad_vocab") else tokenizer.get("vocab_size")
    return {"vocab_size": tokens} if isinstance(tokens, int) and not isinstance(tokens, bool) else {}


# Allowed values of `_target_`, which Megatron-Bridge executes: configuration classes, and functions that are not called
# (`_call_: false`) or only bound (`_partial_: true`).
_NAMED = re.compile(
    r"(megatron\.(bridge|core|training)|torch\.nn\.(init|functional))(\.[A-Za-z]\w*)+"
    r"|torch\.(b?float\d*\w*|half|double|u?int\d+|bool)|signal\.Signals"
    r"|transformers\.models\.\w+\.configuration_\w+\.\w+(Vision|Text)Config"
)


def harmless(content: Any, path: tuple[str, ...] = ()) -> tuple[Any, list[str]]:
    """Return a file's content without values that would run foreign code, and the paths of those removed.

    Megatron-Bridge imports and calls the object that `_target_` names.

    Args:
        content: the parsed file.
        path: path of this part in the file.
    """
    if isinstance(content, list):
        items = [harmless(item, (*path, str(number))) for number, item in enumerate(content)]
        return [item for item, _ in items], [place for _, places in items for place in places]
    if not isinstance(content, Mapping):
        return content, []
    if "_target_" in content and not _is_harmless(content):
        return None, [".".join(path) or "the whole of it"]
    kept: dict[str, Any] = {}
    emptied: list[str] = []
    for name, value in content.items():
        kept[name], places = harmless(value, (*path, name))
        emptied += places
    return kept, emptied


def _is_harmless(node: Mapping[str, Any]) -> bool:
    target = node["_target_"]
    if not isinstance(target, str) or not _NAMED.fullmatch(target):
        return False
    is_class = target.rpartition(".")[2][:1].isupper()
    return is_class or node.get("_call_") is False or node.get("_partial_") is True


def with_facts(content: Mapping[str, Any], layout: Mapping[str, int], checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the file for a new checkpoint.

    Args:
        content: content of the source's file, or new content.
        layout: fields of `model` to be replaced.
        checkpoint: fields of `checkpoint` to be replaced.
    """
    return {
        **content,
        "model": {**_section(content, "model"), **layout},
        "checkpoint": {**_section(content, "checkpoint"), **checkpoint},
    }
