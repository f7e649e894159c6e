"""Keys of `config.json` that do not change what a model computes: for all families, and for each class of transformers.

What a class neither declares nor reads cannot change its results: `config_reads.json` lists what it does.

Sources: `PretrainedConfig` (transformers/configuration_utils.py, 4.36 to 5.23) with the parameters of generation that
it held until 5, and what training tools add to the files that they save.
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

from mcore_ckpt_ext.settings import ACCEPT_KEYS

TABLE = Path(__file__).with_name("config_reads.json")
"""What the classes of transformers declare and read, by release: `scripts/config_reads.py` writes it."""
OF_THE_FILE = frozenset(
    {"torch_dtype", "dtype", "transformers_version", "_name_or_path", "auto_map", "quantization_config"}
)
"""They describe the file that they stand in: a folder made of it says them anew, or not at all."""
ABOUT_OTHER_FILES = frozenset({"auto_map", "quantization_config"})
"""They describe code or weights that a folder that is written does not have."""
MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""How many multi-token prediction (MTP) layers a folder may have; those that transformers writes have none of them."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

_TEXT = """
    architectures model_type
# How it is called, and what it gives back.
    return_dict output_attentions output_hidden_states output_router_logits use_cache torchscript tf_legacy_loss
    use_bfloat16 chunk_size_feed_forward keys_to_ignore_at_inference cache_implementation attn_implementation
    _attn_implementation _attn_implementation_internal _attn_implementation_autoset experts_implementation
    _experts_implementation _experts_implementation_internal use_flash_attn use_flash_attention_2 _flash_attn_2_enabled
    is_encoder_decoder is_decoder tie_encoder_decoder cross_attention_hidden_size tie_weights pretraining_tp
# Heads for classes, and what they are for.
    id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout prefix
# Tokens.
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id tokenizer_class
    decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids
# Generation.
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences output_scores return_dict_in_generate remove_invalid_values
    exponential_decay_length_penalty
# Training, and the tools that trained it.
    initializer_range router_aux_loss_coef aux_loss_alpha seq_aux unsloth_version unsloth_fixed model_max_length
    _commit_hash use_logn_attn_in_training ep_size
# The pruning of heads, of which none is left in a folder.
    pruned_heads
"""
WITHOUT_EFFECT = OF_THE_FILE.union(
    word for line in _TEXT.splitlines() if not line.startswith("#") for word in line.split()
)
_BASE = "PretrainedConfig"
_SHOWN = 8
_accepted: ContextVar[frozenset[str]] = ContextVar("accepted_keys", default=frozenset())


@dataclass(frozen=True)
class NeutralKeys:
    """Keys of one `config.json` that its family does not map and that do not change what the model computes.

    Attributes:
        model: the class of transformers that computes the model.
        release: the newest release of transformers whose classes are known.
        unread: keys that the class neither declares nor reads.
        defaults: keys with the value that the class has without them.
        accepted: keys that the user accepts.
        strict: why keys outside the table are refused; empty where they are not.
    """

    model: str = ""
    release: str = ""
    unread: frozenset[str] = field(default=frozenset())
    defaults: frozenset[str] = field(default=frozenset())
    accepted: frozenset[str] = field(default=frozenset())
    strict: str = ""

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return self.unread | self.defaults | self.accepted

    def notices(self, mapped: frozenset[str]) -> list[str]:
        """Name the keys that are carried without an effect, but for those that are `mapped`."""
        found = []
        if unread := sorted(self.unread - mapped):
            found.append(
                f"keys of config.json that {self.model} of transformers (up to {self.release}) does not read, carried "
                f"as they are: {_some(unread)}"
            )
        if accepted := sorted(self.accepted - mapped):
            found.append(f"keys of config.json accepted as without effect: {_some(accepted)}")
        return found


@contextmanager
def accepting(names: Sequence[str]) -> Iterator[None]:
    """Accept keys of `config.json`, beside those of the setting, inside the block."""
    token = _accepted.set(_accepted.get() | frozenset(names))
    try:
        yield
    finally:
        _accepted.reset(token)


def is_accepted(key: str) -> bool:
    """Whether the user accepts a key of `config.json`, by `--accept-key` or the setting."""
    return key in _accepted.get().union(ACCEPT_KEYS.value)


def neutral_keys(
    config: Mapping[str, Any], model_type: str, whole: Mapping[str, Any] | None = None, *, written: bool = False
) -> NeutralKeys:
    """The keys that have no effect in the class of transformers for a model type.

    Args:
        config: of the text.
        model_type: as `config.json` has it: that of the whole where the model also sees images.
        whole: all of `config.json`, where the text is a part of it.
        written: for a folder that is written, which has no code of its own.
    """
    releases = [(release, entry) for release, classes in _table().items() if (entry := classes.get(model_type))]
    of_base = [classes[_BASE] for classes in _table().values()]
    accepted = _accepted.get().union(ACCEPT_KEYS.value) & config.keys()
    stated = {} if written else {**(whole or {}), **config}
    strict = _why_strict(stated, bool(releases), model_type)
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


def _why_strict(config: Mapping[str, Any], is_known: bool, model_type: str) -> str:
    newest = [*_table()][-1]
    if config.get("auto_map"):
        return "auto_map names code of the folder's own, which may read them"
    if not is_known:
        return f"transformers {newest} has no class for {model_type}"
    stated = _numbers(config.get("transformers_version"))
    if stated > _numbers(newest):
        return f"config.json is of transformers {config['transformers_version']}, and classes up to {newest} are known"
    return ""


def _numbers(version: object) -> tuple[int, ...]:
    match = re.match(r"(\d{1,6})\.(\d{1,6})", version) if isinstance(version, str) else None
    return tuple(int(part) for part in match.groups()) if match else ()


def _same(value: Any, default: Any) -> bool:
    """Whether two values of JSON are equal, `false` not being 0."""
    return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    """By release of transformers, oldest first, and model type."""
    found: Mapping[str, Mapping[str, Any]] = json.loads(TABLE.read_text())
    return found


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f", and {more} more" if more > 0 else "")
