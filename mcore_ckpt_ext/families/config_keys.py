"""Keys of `config.json` without effect on the model: for all families, and per transformers class.

A key that a class neither declares nor reads cannot change its results. `config_reads.json` lists the keys that each
class declares or reads.

Sources: `PretrainedConfig` (transformers/configuration_utils.py, 4.36 to 5.23) with the generation parameters that it
had before release 5, and keys that training tools add.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import join_some
from mcore_ckpt_ext.settings import ACCEPT_KEYS

TABLE = Path(__file__).with_name("config_reads.json")
"""Keys that the classes of transformers declare and read, by release; `scripts/config_reads.py` writes it."""
OF_THE_FILE = frozenset(
    {"torch_dtype", "dtype", "transformers_version", "_name_or_path", "auto_map", "quantization_config"}
)
"""Keys that describe the file itself; a converted folder has new values, or none."""
ABOUT_OTHER_FILES = frozenset({"auto_map", "quantization_config"})
"""Keys that describe code or weights which a written folder does not have."""
MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Keys for the number of multi-token prediction (MTP) layers; folders written by transformers have none."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "n_embd",
    "n_layer",
    "n_head",
)
"""Sizes that most classes declare, each with a default of its own; published files leave some of them out."""

_TEXT = """
    architectures model_type
# Arguments and results of the forward pass.
    return_dict output_attentions output_hidden_states output_router_logits use_cache torchscript tf_legacy_loss
    use_bfloat16 chunk_size_feed_forward keys_to_ignore_at_inference cache_implementation attn_implementation
    _attn_implementation _attn_implementation_internal _attn_implementation_autoset experts_implementation
    _experts_implementation _experts_implementation_internal use_flash_attn use_flash_attention_2 _flash_attn_2_enabled
    is_encoder_decoder is_decoder tie_encoder_decoder cross_attention_hidden_size tie_weights pretraining_tp
# Classification heads.
    id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout prefix
# Tokens.
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id tokenizer_class
    decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids
# Generation.
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences output_scores return_dict_in_generate remove_invalid_values
    exponential_decay_length_penalty
# Training, and training tools.
    initializer_range router_aux_loss_coef aux_loss_alpha seq_aux unsloth_version unsloth_fixed model_max_length
    _commit_hash use_logn_attn_in_training ep_size
# Pruned heads, which a folder does not contain.
    pruned_heads
"""
WITHOUT_EFFECT = OF_THE_FILE.union(
    word for line in _TEXT.splitlines() if not line.startswith("#") for word in line.split()
)
_BASE = "PretrainedConfig"
_SHOWN = 8
MOST_LISTED = 100
"""Keys that a refusal lists: all of any published file."""
_accepted: ContextVar[frozenset[str]] = ContextVar("accepted_keys", default=frozenset())


@dataclass(frozen=True)
class NeutralKeys:
    """Keys of one `config.json` that its family does not map and that have no effect on the model.

    Attributes:
        model: the transformers class of the model.
        release: newest release of transformers whose classes are known.
        unread: keys that the class neither declares nor reads.
        defaults: keys whose value equals the default of the class.
        accepted: keys that the user accepts as without effect.
        strict: reason why keys outside the table are refused; empty if they are not.
    """

    model: str = ""
    release: str = ""
    unread: frozenset[str] = field(default=frozenset())
    defaults: frozenset[str] = field(default=frozenset())
    accepted: frozenset[str] = field(default=frozenset())
    strict: str = ""

    @property
    def names(self) -> frozenset[str]:
        """All neutral keys."""
        return self.unread | self.defaults | self.accepted

    def notices(self, mapped: frozenset[str]) -> list[str]:
        """Return notices about keys that are copied although they have no effect, except `mapped` keys."""
        notices = []
        if unread := sorted(self.unread - mapped):
            notices.append(
                f"keys of config.json that {self.model} of transformers (up to {self.release}) does not read, carried "
                f"as they are: {join_some(unread, _SHOWN)}"
            )
        if accepted := sorted(self.accepted - mapped):
            notices.append(f"keys of config.json accepted as without effect: {join_some(accepted, _SHOWN)}")
        return notices


@contextmanager
def accept_keys(names: Sequence[str]) -> Iterator[None]:
    """Accept keys of `config.json` inside the block, in addition to those of the setting."""
    token = _accepted.set(_accepted.get() | frozenset(names))
    try:
        yield
    finally:
        _accepted.reset(token)


def is_accepted(key: str) -> bool:
    """Return whether the user accepts a key of `config.json`, by `--accept-key` or the setting."""
    return key in _accepted.get().union(ACCEPT_KEYS.value)


def neutral_keys(
    config: Mapping[str, Any], model_type: str, whole: Mapping[str, Any] | None = None, *, written: bool = False
) -> NeutralKeys:
    """Return the keys that have no effect in the transformers class for a model type.

    Args:
        config: configuration of the language model.
        model_type: `model_type` of `config.json`; of a vision-language model, that of the whole model.
        whole: the whole `config.json`, if the language model is a part of it.
        written: the folder is being written, so it has no own code.
    """
    releases = [(release, entry) for release, classes in _table().items() if (entry := classes.get(model_type))]
    of_base = [classes[_BASE] for classes in _table().values()]
    accepted = _accepted.get().union(ACCEPT_KEYS.value) & config.keys()
    keys = {} if written else {**(whole or {}), **config}
    strict = _why_strict(keys, bool(releases), model_type)
    defaults: dict[str, Any] = {}
    for entry in (*of_base, *([] if strict else [entry for _, entry in releases])):
        defaults |= entry["declares"]
    at_default = {key for key, value in config.items() if key in defaults and _same(value, defaults[key])}
    if strict:
        return NeutralKeys(defaults=frozenset(at_default), accepted=frozenset(accepted), strict=strict)
    entries = [*of_base, *(entry for _, entry in releases)]
    read = {key for entry in entries for key in (*entry["declares"], *entry["reads"])}
    newest, entry = releases[-1]
    return NeutralKeys(
        entry["model"], newest, frozenset(config.keys() - read), frozenset(at_default), frozenset(accepted)
    )


def default_sizes(model_type: str) -> dict[str, Any]:
    """Return the default of each of `SIZES` that the newest known class of a model type has."""
    declared = [classes[model_type]["declares"] for classes in _table().values() if model_type in classes]
    return {key: declared[-1][key] for key in SIZES if declared and declared[-1].get(key) is not None}


def _why_strict(config: Mapping[str, Any], is_known: bool, model_type: str) -> str:
    newest = [*_table()][-1]
    if config.get("auto_map"):
        return "auto_map names code of the folder's own, which may read them"
    if not is_known:
        return f"no class for {model_type} is among those of transformers {newest} that are known here"
    release = _numbers(config.get("transformers_version"))
    if release > _numbers(newest):
        return f"config.json is of transformers {config['transformers_version']}, and classes up to {newest} are known"
    return ""


def _numbers(version: object) -> tuple[int, ...]:
    match = re.match(r"(\d{1,6})\.(\d{1,6})", version) if isinstance(version, str) else None
    return tuple(int(part) for part in match.groups()) if match else ()


def _same(value: Any, default: Any) -> bool:
    """Return whether two JSON values are equal; `false` and 0 differ."""
    return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    """Return the table by release of transformers, oldest first, and by model type."""
    table: Mapping[str, Mapping[str, Any]] = json.loads(TABLE.read_text())
    return table
