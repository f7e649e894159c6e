"""Tests what the small files of a tokenizer say: the size of the vocabulary comes second, special tokens are taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.families.text_parts import text_config
from mcore_ckpt_ext.formats.auxiliary_files import configured_tokens, special_tokens, tokenizer_tokens
from tests.harness.huggingface import CONFIGS, VOCABULARY, make, save_whole, tensors

TOKENS = 200
HERE = Path(__file__).parent
PUBLISHED = sorted(HERE.glob("published/*.json")) + sorted(HERE.glob("own_code/*/config.json"))
SPECIAL = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}


def tokenizer(folder: Path, **files: Any) -> Path:
    """Write a tokenizer with fewer tokens than the tiny models have rows."""
    folder.mkdir(exist_ok=True)
    words = {f"t{number}": number for number in range(TOKENS)}
    content = {"tokenizer": {"model": {"vocab": words}, "added_tokens": []}, **files}
    for name, value in content.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def in_bytes(**files: Any) -> dict[str, bytes]:
    return {f"{name}.json": json.dumps(value).encode() for name, value in files.items()}


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem if path.stem != "config" else path.parent.name)
def test_a_published_configuration_tells_the_rows_of_its_embedding(path: Path) -> None:
    whole = json.loads(path.read_text())
    text = text_config(whole) or whole
    expected = text.get("padded_vocab_size", text.get("vocab_size"))
    small = {"model": {"vocab": {"a": 0, "b": 1}}}
    found = configured_tokens(in_bytes(config=whole, tokenizer=small))
    assert found == expected
    assert expected is not None


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_tells_the_rows_of_its_embedding(name: str) -> None:
    assert configured_tokens(in_bytes(config=CONFIGS[name]().to_dict(), tokenizer={})) == VOCABULARY


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
@pytest.mark.parametrize("loop", ["megatron", "bridge"])
def test_no_row_of_a_text_part_is_cut(name: str, loop: Any, tmp_path: Path) -> None:
    """The folder has no size of its own, and its tokenizer fewer tokens than the embedding rows."""
    save_whole(name, tmp_path / "model")
    tokenizer(tmp_path / "model")
    assert "vocab_size" not in json.loads((tmp_path / "model" / "config.json").read_text())
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist(loop=loop))
    report = mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    shapes = [tensor.shape[0] for label, tensor in tensors(tmp_path / "back").items() if "embed_tokens" in label]
    assert shapes == [VOCABULARY]
    assert not [note for note in report.notes if "are cut" in note]


def test_no_row_of_chatglm_is_cut(tmp_path: Path) -> None:
    """It calls the size `padded_vocab_size`."""
    source = shutil.copytree(HERE / "own_code" / "chatglm", tmp_path / "model")
    tokenizer(source, tokenizer={"model": {"vocab": {"a": 0, "b": 1}}})
    mcore_ckpt_ext.convert(source, tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    before = tensors(source)
    shapes = {label: tensor.shape for label, tensor in tensors(tmp_path / "back").items()}
    assert shapes == {label: before[label].shape for label in shapes}
    assert "transformer.embedding.word_embeddings.weight" in shapes


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer": {"added_tokens": [{"content": "<s>", "id": 7}]}}, {"bos_token_id": 7}),
        ({"tokenizer": {"model": {"vocab": {"<s>": 3, "</s>": 4}}}}, {"bos_token_id": 3, "eos_token_id": 4}),
        ({"tokenizer": {"model": {"vocab": [["</s>", 0.0], ["<s>", -1.0]]}}}, {"bos_token_id": 1, "eos_token_id": 0}),
        ({"vocab": {"<s>": 5}, "added_tokens": {"</s>": 6}}, {"bos_token_id": 5, "eos_token_id": 6}),
        ({"tokenizer": {"model": {"vocab": {"a": 0}}}}, {}),
    ],
    ids=str,
)
def test_special_tokens(files: dict[str, Any], expected: dict[str, int]) -> None:
    assert special_tokens(in_bytes(tokenizer_config=SPECIAL, **files)) == expected
    assert special_tokens(in_bytes(special_tokens_map=SPECIAL, **files)) == expected


def test_special_tokens_by_the_decoder_of_added_tokens() -> None:
    decoder = {"9": {"content": "<s>"}, "x": {"content": "</s>"}}
    files = in_bytes(tokenizer_config={**SPECIAL, "added_tokens_decoder": decoder})
    assert special_tokens(files) == {"bos_token_id": 9}
    assert tokenizer_tokens(files) == 10
    assert tokenizer_tokens({}) is None


def test_a_tokenizer_gives_the_special_tokens_of_config_json(tmp_path: Path) -> None:
    """A token whose number no row has is not written; what is missing is reported with what to do."""
    make("qwen2", tmp_path / "model")
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key not in keys}))
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    stored = tmp_path / "run" / "release" / "tokenizer" / "config.json"
    added = {"model": {"vocab": {"<s>": 1, "</s>": 2, "[PAD]": VOCABULARY}}}
    named = {**SPECIAL, "pad_token": "[PAD]"}
    for number, (config, expected, said) in enumerate([
        (named, {"bos_token_id": 1, "eos_token_id": 2}, ""),
        ({"bos_token": "<s>"}, {"bos_token_id": 1}, "config.json has no eos_token_id: the tokenizer names none"),
    ]):  # fmt: skip
        if number:  # before, the folder has the published configuration, which lacks them as well
            stored.unlink()
        folder = tokenizer(tmp_path / f"tokenizer{number}", tokenizer=added, tokenizer_config=config)
        target = mcore_ckpt_ext.HuggingFace(tokenizer=folder, vocab_size=VOCABULARY)
        report = mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / f"hf{number}", target)
        written = json.loads((tmp_path / f"hf{number}" / "config.json").read_text())
        assert {key: written[key] for key in keys if written.get(key) is not None} == expected
        generation = json.loads((tmp_path / f"hf{number}" / "generation_config.json").read_text())
        assert {key: generation[key] for key in keys if key in generation} == expected
        assert [note for note in report.notes if note.startswith("config.json has no") and said in note] or not said
        assert said or not [note for note in report.notes if note.startswith("config.json has no")]
