"""Small files stored with a model, such as its tokenizer: which exist, and notes on which are copied."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError, join_some, shorten
from mcore_ckpt_ext.families.config_keys import TOKENS
from mcore_ckpt_ext.families.text_parts import text_section
from mcore_ckpt_ext.storage.checked_files import read_file
from mcore_ckpt_ext.storage.json_text import parse_json
from mcore_ckpt_ext.storage.paths import as_path, is_remote

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.view import CheckpointView

CONFIG = "config.json"
_DIGITS = 9  # more than the number of any token has
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FOLDER = "tokenizer"
"""Megatron keeps it in this subfolder of an iteration (`save_tokenizer_assets`, checkpointing.py, commit 6c344290)."""

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tokenizer.model.v7",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
COMPANIONS = (CONFIG, GENERATION_CONFIG, *_TOKENIZER)
"""Names of the small files that belong to a model."""
# A tokenizer's own Python code, which this package never runs, and its additional templates.
_FURTHER = ("tokenization_*.py", "*.tiktoken", "additional_chat_templates/*.jinja")
_FURTHER_PATTERN = r"tokenization_\w+\.py|[\w.-]+\.tiktoken|additional_chat_templates/[\w.-]+\.jinja"
COMPANION_PATTERN = "|".join([*map(re.escape, COMPANIONS), _FURTHER_PATTERN])
"""A regular expression that matches the names of all small files that a folder may have."""
_CODE = "auto_map"
"""The JSON key with the names of classes that transformers imports from the folder, or from another repository.

Source: `get_class_from_dynamic_module`, transformers/dynamic_module_utils.py, 4.36 to 5.23: with `trust_remote_code`.
"""


def auxiliary_files(folder: Path, below: str = "") -> dict[str, bytes]:
    """Read the small files that belong to a model: its tokenizer, and the two configurations.

    Args:
        folder: a checkpoint, a model or a tokenizer; it need not exist.
        below: the subfolder that contains the files.
    """
    files: dict[str, bytes] = {}
    for name in _companion_names(folder, below):
        with contextlib.suppress(OSError):
            files[name] = read_file(folder, _join(below, name))
    return files


def tokenizer_files(path: str | os.PathLike[str] | None) -> dict[str, bytes]:
    """Read the small files in the tokenizer folder that the user names.

    Returns:
        Empty if `path` is None.

    Raises:
        UnreadableCheckpointError: the folder contains no such files.
    """
    if path is None:
        return {}
    files = auxiliary_files(as_path(path))
    if not files:
        refused = "; ".join(f"{name}: {why}" for name, why in refused_auxiliary_files(as_path(path)).items())
        there = is_remote(as_path(path)) or as_path(path).is_dir()
        raise UnreadableCheckpointError(
            "the folder holds no tokenizer" if there else "there is no such folder",
            found=refused or None,
            expected="the small files of a tokenizer or model, such as tokenizer.json or config.json",
            where=str(path),
            hint="name the folder of a tokenizer or model on this machine: --tokenizer PATH",
        )
    return files


def _companion_names(folder: Path, below: str) -> list[str]:
    """List the names to look for: the fixed ones, and those in a local folder that match a pattern."""
    if is_remote(folder):
        return list(COMPANIONS)
    there = folder / below
    further = (path.relative_to(there).as_posix() for pattern in _FURTHER for path in there.glob(pattern))
    return [*COMPANIONS, *sorted(name for name in further if re.fullmatch(COMPANION_PATTERN, name))]


def refused_auxiliary_files(folder: Path, below: str = "") -> dict[str, str]:
    """Return the small files that exist but cannot be copied, with the reason."""
    reasons: dict[str, str] = {}
    for name in _companion_names(folder, below):
        if not is_remote(folder) and not os.path.lexists(folder / below / name):
            continue
        if reason := _why_unreadable(folder, _join(below, name)):
            reasons[name] = reason
    return reasons


def _why_unreadable(folder: Path, name: str) -> str | None:
    try:
        read_file(folder, name)
    except FileNotFoundError:
        return None if is_remote(folder) else "a link to nowhere"  # a remote store has no broken links
    except OSError as error:
        return error.strerror or str(error)
    return None


def json_of(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Parse a JSON object among small files; return an empty one if it is missing or invalid."""
    try:
        content = parse_json(files.get(name, b"{}"))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def configured_tokens(files: Mapping[str, bytes]) -> int | None:
    """Return the vocabulary size in `config.json`, often more than the tokenizer has tokens.

    Models that also see or hear have it in the part about their language model, ChatGLM as `padded_vocab_size`.

    Returns:
        None if no key gives it.
    """
    config = json_of(files, CONFIG)
    for part in (text_section(config) or {}, config):
        sizes = (part.get(key) for key in ("padded_vocab_size", "vocab_size"))
        if (size := next((size for size in sizes if type(size) is int), None)) is not None:
            return size
    return None


def tokenizer_tokens(files: Mapping[str, bytes]) -> int | None:
    """Return the number of tokens of a tokenizer, by its own files; None if no file gives it."""
    numbers = _token_numbers(files)
    return 1 + max(numbers.values()) if numbers else None


def special_tokens(files: Mapping[str, bytes]) -> dict[str, int]:
    """Return the numbers of the tokens that a tokenizer names as special, by their keys in `config.json`.

    transformers' trainer sets these keys to the tokenizer's numbers as well (`align_special_tokens`,
    trainer_utils.py, 4.57 to 5.23).
    """
    numbers = _token_numbers(files)
    named = {**json_of(files, "special_tokens_map.json"), **json_of(files, "tokenizer_config.json")}
    special: dict[str, int] = {}
    for key in TOKENS:
        token = named.get(key.removesuffix("_id"))
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in numbers:
            special[key] = numbers[text]
    return special


def _token_numbers(files: Mapping[str, bytes]) -> dict[str, int]:
    """Return the number of each token by its text, by all files of a tokenizer; added tokens prevail."""
    tokenizer = json_of(files, "tokenizer.json")
    model = tokenizer.get("model")
    added = tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # unigram: pairs of text and score
        texts = [item[0] if isinstance(item, list) and item else item for item in vocabulary]
        vocabulary = {str(text): number for number, text in enumerate(texts)}
    decoder = json_of(files, "tokenizer_config.json").get("added_tokens_decoder")
    listed = [(token.get("content"), token.get("id")) for token in _objects(added)]
    decoded = decoder.items() if isinstance(decoder, dict) else ()
    for number, token in decoded:
        if isinstance(token, dict) and number.isascii() and number.isdigit():
            listed.append((token.get("content"), int(number[:_DIGITS])))
    if not isinstance(vocabulary, dict):
        vocabulary = json_of(files, "vocab.json")
    pairs = [*vocabulary.items(), *json_of(files, "added_tokens.json").items(), *listed]
    return {str(text): number for text, number in pairs if type(number) is int and number >= 0}


def _objects(items: object) -> list[dict[str, Any]]:
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _join(below: str, name: str) -> str:
    return f"{below}/{name}" if below else name


def companion_notes(taken: Mapping[str, bytes], checkpoint: CheckpointView) -> list[str]:
    """Report the small files that are copied along with a checkpoint, and those that are not.

    Args:
        taken: the files that are copied, by name.
        checkpoint: the checkpoint that contains them.
    """
    refused = refused_auxiliary_files(checkpoint.files.folder, checkpoint.files.auxiliary_files_below)
    notes = [f"copied along with the weights: {', '.join(taken)}"] if taken else []
    notes += _code_notes(taken)
    return notes + [f"not copied: {name}: {why}" for name, why in refused.items()]


def _code_notes(taken: Mapping[str, bytes]) -> Iterator[str]:
    for name in taken:
        if name.endswith(".json") and (named := json_of(taken, name).get(_CODE)):
            yield (
                f"{name} names code ({_CODE}: {shorten(join_some(_names(named), 3))}), which is copied with it as a "
                "name only: nothing here runs it, and transformers imports it with trust_remote_code=True"
            )


def _names(named: object) -> list[str]:
    """List the classes of an `auto_map`: its values are a name or a list of names per kind of class."""
    if isinstance(named, dict):
        return [name for value in named.values() for name in _names(value)]
    if isinstance(named, list):
        return [name for value in named for name in _names(value)]
    return [] if named is None else [str(named)]
