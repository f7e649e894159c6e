"""Test limits of work and memory by input size: JSON, safetensors headers, configurations, trackers."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
from safetensors import SafetensorError

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.families.qwen3_moe import Qwen3MoE
from mcore_ckpt_ext.formats.auxiliary_files import auxiliary_files, tokenizer_tokens
from mcore_ckpt_ext.formats.canonical.reader import INDEX_FILE
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.zarr import reader as zarr
from mcore_ckpt_ext.layout.sidecar import FILE_NAME, RecordedParameter
from mcore_ckpt_ext.storage.checkpoint_dirs import TRACKER_FILE, read_tracker
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.json_tree import decode
from mcore_ckpt_ext.storage.safetensors import list_arrays
from tests.harness.bounds import in_bounds
from tests.harness.checkpoints import fixture_named, recorded_layout
from tests.harness.damage import without_digests


def test_a_zarr_array_without_elements_has_no_chunks(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    about = {"zarr_format": 2, "compressor": None, "filters": None, "order": "C", "dtype": "<f4"}
    (tmp_path / "a" / ".zarray").write_text(json.dumps({**about, "shape": [0, 10**8], "chunks": [1, 1]}))
    assert in_bounds(lambda: zarr.read_index(tmp_path)) == ""
    assert zarr.read_index(tmp_path).arrays["a"].chunks == ()


def test_a_number_of_layers_that_no_model_has_is_refused() -> None:
    """Whoever reads arguments, `verify --quick` too, counts layers one by one."""
    from mcore_ckpt_ext.job.job_arguments import JobArguments

    with pytest.raises(UnreadableCheckpointError, match="num_layers"):
        JobArguments.of({"num_layers": 10**12})


@pytest.fixture(scope="module")
def canonical(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bounds") / "canonical"
    mcore_ckpt_ext.convert(fixture_named("p42").run, folder, mcore_ckpt_ext.Canonical())
    return folder


@pytest.fixture
def about(canonical: Path) -> Iterator[Path]:
    path = without_digests(canonical) / "common.json"
    whole = path.read_text()
    yield path
    path.write_text(whole)


def test_a_sharded_key_of_another_layer_is_refused(about: Path) -> None:
    content = json.loads(about.read_text())
    name = next(name for name, (_, index) in content["sharded_keys"].items() if index)
    content["sharded_keys"][name][1] = [10**9]
    about.write_text(json.dumps(content))
    with pytest.raises(UnreadableCheckpointError, match="belongs to another tensor"):
        open_checkpoint(about.parent).model.sharded_keys()


@pytest.mark.parametrize(
    "shape", [[10**4000] * 5000, [1] * 10**6, [1 << 40, 1 << 40], [0, 1 << 62], [1.5], ["1"], [-1]],
    ids=["large numbers", "many axes", "large", "none of many", "a fraction", "a text", "negative"],
)  # fmt: skip
def test_a_shape_that_no_tensor_has_is_refused(shape: list[object], tmp_path: Path) -> None:
    header = json.dumps({"weight.x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)

    def read() -> None:
        with FolderReader(tmp_path) as reader:
            list(list_arrays(reader, "a.safetensors"))

    assert in_bounds(read).startswith("UnreadableCheckpointError: a safetensors file is damaged")


def header_of(arrays: dict[str, list[int]]) -> bytes:
    """A safetensors file's header, of arrays of bytes that lie somewhere."""
    text = json.dumps({
        key: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for key, (begin, end) in arrays.items()
    }).encode()  # fmt: skip
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": [4, 8], "b": [0, 4], "c": [4, 4]}, ""),
        ({"a": [0, 8], "b": [0, 8]}, "begins at byte"),
        ({"a": [0, 5], "b": [4, 8]}, "begins at byte"),
        ({"a": [0, 3], "b": [4, 8]}, "begins at byte"),
        ({"a": [1, 8]}, "begins at byte"),
        ({"a": [0, 7]}, "the arrays end at byte"),
        ({"a": [0, 9]}, "would lie at"),
    ],
    ids=["any order", "twice", "overlapping", "a gap", "a late begin", "an early end", "a late end"],
)
def test_arrays_of_a_safetensors_file_fill_it(arrays: dict[str, list[int]], message: str, tmp_path: Path) -> None:
    """The library is asked, too."""
    content = header_of(arrays) + bytes(8)
    (tmp_path / "a.safetensors").write_bytes(content)
    with FolderReader(tmp_path) as reader:
        if message:
            with pytest.raises(UnreadableCheckpointError, match=message):
                list_arrays(reader, "a.safetensors")
            with pytest.raises(SafetensorError):
                safetensors.torch.load(content)
        else:
            assert {key for key, *_ in list_arrays(reader, "a.safetensors")} == set(safetensors.torch.load(content))


def test_config_json_requires_no_more_than_the_folder_can_hold(tmp_path: Path) -> None:
    """Ten thousand layers of 65,536 query groups each, in a few hundred thousand bytes."""
    arrays = {f"model.layers.{layer}.input_layernorm.weight": [0, 0] for layer in range(10_000)}
    (tmp_path / "model.safetensors").write_bytes(header_of(arrays))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 10_000,
        "hidden_size": 65_536, "intermediate_size": 1, "num_attention_heads": 65_536, "num_key_value_heads": 65_536,
        "vocab_size": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert in_bounds(lambda: open_checkpoint(tmp_path)).startswith("OverBudgetError")


@pytest.mark.parametrize("content", ["[" * 10**5, '{"a": 1, "a": 2}', '{"a": ' * 10**5, "9" * 5000, "1", "\ud800"])
def test_json_that_says_no_one_thing_is_refused(content: str, tmp_path: Path) -> None:
    for name in ("metadata.json", "config.json", "tokenizer.json", FILE_NAME, "common.json", INDEX_FILE):
        path = tmp_path / name
        path.write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.raises(UnreadableCheckpointError):
            open_checkpoint(tmp_path)
        assert tokenizer_tokens(auxiliary_files(tmp_path)) is None
        path.unlink()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"model": {"vocab": {"a": 0, "b": 4}}, "added_tokens": [{"id": 7}]}, 8),
        ({"model": {"vocab": [["a", 0.5], ["b", 0.1]]}}, 2),
        ({"model": {"vocab": {"a": [], "b": "4"}}, "added_tokens": [{"id": None}, 3, {}]}, None),
        ({"model": {"vocab": {"a": 1}}, "added_tokens": 3}, 2),
        ({"model": [], "added_tokens": {}}, None),
    ],
)
def test_an_untrusted_tokenizer_is_counted_or_not(content: object, expected: int | None, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert tokenizer_tokens(auxiliary_files(tmp_path)) == expected


def test_layers_without_experts_are_looked_up_in_no_long_list() -> None:
    """65,536 layers and half a million numbers would be compared each with each."""
    (setting,) = (setting for setting in Qwen3MoE.settings if "mlp_only_layers" in setting.keys)
    config = {"num_hidden_layers": 1 << 16, "mlp_only_layers": [*([-1] * 500_000), 3, 1 << 70]}
    assert in_bounds(lambda: setting.arguments(config)) == ""
    assert setting.arguments({**config, "num_hidden_layers": 5}) == {"moe_layer_freq": [1, 1, 1, 0, 1]}


def test_a_sidecar_stands_for_no_more_than_its_size_explains(tmp_path: Path) -> None:
    fixture = fixture_named("p01").copy_to(tmp_path / "p01")
    recorded = recorded_layout(fixture)
    (group, *_) = recorded.groups
    parameters = tuple(RecordedParameter(f"{number}", number, number + 1) for number in range(10_000))
    bucket = replace(group.buckets[0], parameters=parameters)
    endless = replace(recorded, groups=(replace(group, indices=tuple(range(10_000)), buckets=(bucket,)),))
    (fixture.iteration / FILE_NAME).write_text(endless.to_json())
    checkpoint = open_checkpoint(fixture.iteration)
    assert checkpoint.job.found_sidecar().sidecar is None
    assert "far more work" in (checkpoint.job.found_sidecar().problem or "")
    assert checkpoint.tensor("fp32_param", checkpoint.names("fp32_param")[0]).read().numel()


@pytest.mark.parametrize("dtype", ["qint8", "quint4x2", "qint32", "bits8", "float", "nothing", ["float32"]])
def test_a_dtype_without_plain_elements_is_refused(dtype: object) -> None:
    described = {"$tensor": {"dtype": dtype, "shape": [4], "data": "AAAAAAAAAAAAAAAAAAAAAA=="}}
    expected = "" if dtype == "float" else "UnreadableCheckpointError: a JSON description is damaged"
    assert in_bounds(lambda: decode(described)).startswith(expected)


@pytest.mark.parametrize("name", [TRACKER_FILE, ".metadata", "common.json", "mcore_ckpt_ext.json"])
def test_reading_does_not_wait_for_a_pipe(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    if name == TRACKER_FILE:
        assert read_tracker(tmp_path / name) is None
    assert in_bounds(lambda: open_checkpoint(tmp_path))


def test_little_of_a_tracker_is_read_and_nothing_outside_the_folder(tmp_path: Path) -> None:
    tracker = tmp_path / "run" / TRACKER_FILE
    tracker.parent.mkdir()
    with tracker.open("wb") as file:
        file.truncate(8 << 30)
    assert in_bounds(lambda: read_tracker(tracker)) == ""
    tracker.unlink()
    (tmp_path / "secret").write_text("of somebody else")
    tracker.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="leads out of the folder"):
        read_tracker(tracker)
