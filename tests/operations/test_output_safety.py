"""Test that output contains only names that this package chooses: no code is copied or generated."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import CheckpointError, UnsafePickleError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.portable_state import writable_extra_states
from mcore_ckpt_ext.job.releases import TORCH_LOADS_PLUGINS
from mcore_ckpt_ext.storage.pickle_allowlist import first_unwritable, has_unsafe_pickle
from mcore_ckpt_ext.storage.pickle_stubs import placeholder_class
from mcore_ckpt_ext.storage.pickling import dumps
from mcore_ckpt_ext.storage.safe_pickle import safe_loads
from mcore_ckpt_ext.targets import TARGETS
from mcore_ckpt_ext.versions import parse_version
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import without_digests

OUR_NAMES = {
    "collections OrderedDict", "argparse Namespace", "torch._utils _rebuild_tensor_v2", "torch FloatStorage",
    "torch BFloat16Storage", "torch ByteStorage", "torch bfloat16", "torch float32", "torch Size", "numpy ndarray",
    "numpy dtype", "numpy._core.multiarray _reconstruct", "_codecs encode", "torch.serialization _get_layout",
    *(f"torch.distributed.checkpoint.metadata {name}" for name in (
        "Metadata", "BytesStorageMetadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
        "ChunkStorageMetadata", "MetadataIndex",
    )),
    "torch.distributed.checkpoint.filesystem _StorageInfo",
}  # fmt: skip


def pickles_of(folder: Path) -> Iterator[bytes]:
    """Every pickle of a run folder that was written: the index, and of each archive."""
    checkpoint = mcore_ckpt_ext.open_checkpoint(folder)
    if (index := checkpoint.files.folder / ".metadata").exists():
        yield index.read_bytes()
    for file, offset, length in set(checkpoint.files.archives()):
        data = (checkpoint.files.folder / file).read_bytes()[offset : offset + length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            yield archive.read("archive/data.pkl")


def names_in(folder: Path) -> set[str]:
    found = set()
    for data in pickles_of(folder):
        for opcode, argument, _ in pickletools.genops(data):
            assert opcode.name not in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")
            found |= {str(argument)} if opcode.name == "GLOBAL" else set()
    return found


@pytest.fixture(scope="module")
def canonical(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("canonical") / "folder"
    mcore_ckpt_ext.convert(fixture_named("p02").run, folder, mcore_ckpt_ext.Canonical())
    return folder


@pytest.fixture
def source(canonical: Path, tmp_path: Path) -> Path:
    """A copy, whose `common.json` may be changed."""
    (tmp_path / "source").mkdir()
    for path in canonical.iterdir():
        (tmp_path / "source" / path.name).write_bytes(path.read_bytes())
    return without_digests(tmp_path / "source")


def hostile(module: str, name: str, *arguments: object) -> dict[str, Any]:
    return {
        "$object": {
            "class": [module, name], "arguments": list(arguments), "called": True, "member": None, "state": [],
            "items": [], "entries": [],
        }
    }  # fmt: skip


def in_the_common_state(about: dict[str, Any], thing: object) -> None:
    about["common"]["surprise"] = thing


def in_the_arguments(about: dict[str, Any], thing: object) -> None:
    about["common"]["args"]["$namespace"]["surprise"] = [{"deep": thing}]


def in_an_extra_state(about: dict[str, Any], thing: object) -> None:
    states = about["extra_states"]
    states = next(iter(states.values())) if list(states) == ["$dict"] else states
    about["extra_states"] = {"decoder.layers.0.self_attention.linear_qkv._extra_state": thing}


def in_the_random_states(about: dict[str, Any], thing: object) -> None:
    about["random_states"][0][1] = thing


def in_the_parameter_groups(about: dict[str, Any], thing: object) -> None:
    about["param_groups"][0]["surprise"] = thing


PLACES = [in_the_common_state, in_the_arguments, in_an_extra_state, in_the_random_states, in_the_parameter_groups]
THINGS = {
    "a callable of a third party": hostile("torch.utils.collect_env", "run", "touch /tmp/never"),
    "the same as a class": {"$class": ["torch.utils.collect_env", "run"]},
    "a dtype of numpy with fields": hostile("numpy", "dtype", "O8", False, True),
}


@pytest.mark.thorough
@pytest.mark.parametrize("to", ["torch_dist", "legacy"])
@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_only_our_own_names_are_written(
    place: Callable[[dict[str, Any], object], None], thing: str, to: str, source: Path, tmp_path: Path
) -> None:
    """Left out with a note, or refused: parameter groups are part of what must be carried."""
    common = json.loads((source / "common.json").read_text())
    place(common, THINGS[thing])
    (source / "common.json").write_text(json.dumps(common))
    try:
        report = mcore_ckpt_ext.convert(source, tmp_path / "out", TARGETS[to]())
    except UnsupportedCheckpointError as error:
        assert place is in_the_parameter_groups
        assert "the output would contain a class that is not allowed" in str(error)
        return
    assert place is not in_the_parameter_groups
    assert names_in(tmp_path / "out") <= OUR_NAMES
    assert any("left out" in note or "written empty" in note for note in report.notes), report.notes


@pytest.mark.parametrize("to", ["torch_dist", "legacy"])
def test_an_honest_source_loses_nothing(to: str, canonical: Path, tmp_path: Path) -> None:
    """Negative control, and what the list must hold."""
    report = mcore_ckpt_ext.convert(canonical, tmp_path / "out", TARGETS[to]())
    assert names_in(tmp_path / "out") <= OUR_NAMES
    assert not any("left out" in note or "written empty" in note for note in report.notes)
    written, source = (mcore_ckpt_ext.open_checkpoint(path) for path in (tmp_path / "out", canonical))
    assert repr(written.states.random()) == repr(source.states.random())


STDLIB = [hostile("posix", "system", "true"), hostile("os", "system", "true"), {"$class": ["builtins", "eval"]}]
BROKEN = [hostile("collections\nOrderedDict\n0cposix", "system\n", "true"), hostile("megatron", "a b")]


@pytest.mark.parametrize("thing", [*STDLIB, *BROKEN], ids=str)
def test_a_description_in_json_is_read_as_strictly_as_a_pickle(thing: object, source: Path, tmp_path: Path) -> None:
    common = json.loads((source / "common.json").read_text())
    in_the_random_states(common, thing)
    (source / "common.json").write_text(json.dumps(common))
    with pytest.raises(UnsafePickleError):
        mcore_ckpt_ext.convert(source, tmp_path / "out", mcore_ckpt_ext.TorchDist())
    assert not (tmp_path / "out").exists()


def stacked(module: str, name: str) -> bytes:
    """A pickle of protocol 4, whose names have no end mark."""
    texts = b"".join(b"X" + struct.pack("<I", len(text)) + text.encode() for text in (module, name))
    return b"\x80\x04" + texts + b"\x93)R."


def test_a_name_with_a_line_break_never_becomes_another(tmp_path: Path) -> None:
    name = ("collections\nOrderedDict\n0cposix", "system")
    with pytest.raises(UnsafePickleError, match="invalid class name"):
        safe_loads(stacked(*name), "here")
    with pytest.raises(UnsupportedCheckpointError, match="the output would contain a class that is not allowed"):
        dumps({"rng_state": placeholder_class(*name)("true")})


def test_a_dtype_that_torch_has_no_storage_class_for_is_named() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="with a tensor of this dtype; found: complex64; .*canonical"):
        dumps({"state": torch.zeros(2, dtype=torch.complex64)})


def test_torch_loads_written_pickles_safely(tmp_path: Path) -> None:
    """Everything that the writer writes, torch's own safe reader knows but for Megatron's index and numpy's arrays."""
    tree = {"state": [1, 2.5, "text", True, None], "dtype": torch.bfloat16, "size": torch.Size([2])}
    if TORCH_LOADS_PLUGINS.is_of(parse_version(torch.__version__) or (0, 0)):  # 2.5 reads its own bytes safely, too
        tree["bytes"] = b"bytes"
    data, _ = dumps(tree)
    with zipfile.ZipFile(tmp_path / "state.pt", "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", b"3\n")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == tree


def stream_of(tree: object) -> bytes:
    stream = io.BytesIO()
    torch.save(tree, stream)
    return stream.getvalue()


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("run",)


class TestPicklesInside:
    """Transformer Engine unpickles the bytes of its extra states."""

    @pytest.mark.parametrize("data", [
        b"", pickle.dumps(None), pickle.dumps({"a": [1.0]}, 2), stream_of({"a": 1}), stream_of({"a": torch.ones(2)}),
    ])  # fmt: skip
    def test_harmless(self, data: bytes) -> None:
        assert not has_unsafe_pickle(data)

    @pytest.mark.parametrize(
        "data",
        [
            pickle.dumps(Runs()),
            stream_of(Runs()),
            pickle.dumps(None) + pickle.dumps(Runs()),
            pickle.dumps(Runs()) + stream_of(None),
            stream_of(None) + stream_of(Runs()),
            stream_of(Runs()) + stream_of(None),
            stacked("torch.utils.collect_env", "run"),
            b"neither",
        ],
        ids=range(8),
    )
    def test_hostile(self, data: bytes) -> None:
        assert has_unsafe_pickle(data)

    @pytest.mark.parametrize("kind", [io.BytesIO, lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8)])
    def test_it_is_written_empty(self, kind: Callable[[bytes], Any]) -> None:
        found, (note,) = writable_extra_states({"bad": kind(pickle.dumps(Runs())), "good": kind(pickle.dumps(None))})
        assert "written empty" in note
        assert found["good"] is not None
        bad = found["bad"]
        assert bad.numel() == 0 if isinstance(bad, torch.Tensor) else torch.load(bad) is None


@pytest.mark.parametrize("value", [
    {"_target_": "os.system", "_args_": ["true"]}, "${oc.env:HOME}", [{"_target_": "os.system"}], "1e-6 # x", True,
    float("nan"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("key", ["rms_norm_eps", "initializer_range", "attention_dropout"])
def test_values_of_a_config_have_their_types(key: str, value: object, tmp_path: Path) -> None:
    """`run_config.yaml` is executed by Megatron-Bridge where a value has a `_target_`."""
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "model", mcore_ckpt_ext.HuggingFace())
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "out", mcore_ckpt_ext.TorchDist())
    assert not (tmp_path / "out").exists()


def test_the_check_can_fail() -> None:
    """Negative control: what the old writer let through."""
    assert first_unwritable([{"a": placeholder_class("posix", "system")("true")}]) == "posix.system"
    code = "import pickle; pickle.loads(b'ccollections\\nOrderedDict\\n0cposix\\nsystem\\n(Vexit 3\\ntR.')"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
