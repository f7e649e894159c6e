"""Test torch archives and pickles, which are read without torch.load and without trust."""

from __future__ import annotations

import argparse
import copy
import enum
import io
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsafePickleError, UnsupportedCheckpointError
from mcore_ckpt_ext.storage.dtypes import with_torch_dtypes
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.json_text import parse_json
from mcore_ckpt_ext.storage.pickle_stubs import Placeholder, origin_of
from mcore_ckpt_ext.storage.safe_pickle import safe_loads
from mcore_ckpt_ext.storage.tensor_reference import TensorReference
from mcore_ckpt_ext.storage.torch_archive import TorchArchive
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import without_digests


class Command:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


class Color(enum.Enum):
    RED = 3


class Custom:
    def __init__(self) -> None:
        self.value = 7


class CustomList(list[int]):
    pass


class CustomDict(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("attack", "name"),
    [
        (Command(os.system, "touch attacked"), "posix.system"),
        (Command(subprocess.check_output, ["touch", "attacked"]), "subprocess.check_output"),
        (Command(eval, "open('attacked', 'w')"), "builtins.eval"),
        (Command(exec, "open('attacked', 'w')"), "builtins.exec"),
        (Command(getattr, os, "system"), "builtins.getattr|nothing|damaged|attribute|posix|import"),
    ],
)
def test_a_pickle_that_runs_something_is_refused_by_name(
    attack: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        data = pickle.dumps(attack)
    except TypeError:  # a module cannot be pickled: name it by import instead
        data = b"\x80\x04cbuiltins\ngetattr\n(cos\nsystem\n\x8c\x04nametR."
    with pytest.raises(UnsafePickleError, match=name):
        safe_loads(data, "here")
    assert not (tmp_path / "attacked").exists()


def test_the_attacks_would_work_with_the_standard_unpickler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what the tests above refuse is live ammunition."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Command(os.system, "touch attacked")))
    assert (tmp_path / "attacked").exists()


def test_unknown_classes_become_inert_placeholders() -> None:
    loaded = safe_loads(pickle.dumps({"custom": Custom(), "color": Color.RED, "list": [1, (2,)]}), "here")
    assert isinstance(loaded["custom"], Placeholder) and loaded["custom"].value == 7  # type: ignore[attr-defined]
    assert isinstance(loaded["color"], Placeholder) and loaded["color"].arguments in ((3,), ("RED",))
    assert loaded["list"] == [1, (2,)]


@pytest.mark.parametrize(("value", "items", "entries"), [
    (CustomList([1]), [1], []), (CustomList([1, 2]), [1, 2], []), (CustomDict(a=1, b=2), [], [("a", 1), ("b", 2)]),
])  # fmt: skip
def test_placeholders_of_containers_keep_what_they_contain(
    value: object, items: list[int], entries: list[tuple[str, int]]
) -> None:
    origin = origin_of(safe_loads(pickle.dumps(value), "here"))
    assert (origin.items, origin.entries) == (items, entries)


def test_values_of_checkpoints_are_read_unchanged() -> None:
    namespace = argparse.Namespace(size=3, dtype=torch.bfloat16, path=[{"a": b"x"}])
    assert with_torch_dtypes(safe_loads(pickle.dumps(namespace), "here")) == namespace


def test_values_read_can_be_pickled_and_copied() -> None:
    """By whoever opens a checkpoint and saves what is in it; a placeholder does not become what it stands for."""
    read = safe_loads(pickle.dumps(argparse.Namespace(size=3, color=Color.RED, custom=Custom())), "here")
    stream = io.BytesIO()
    torch.save(read, stream)
    stream.seek(0)
    for again in (pickle.loads(pickle.dumps(read)), copy.deepcopy(read), torch.load(stream, weights_only=False)):
        assert type(again) is argparse.Namespace and again.size == 3
        for name in ("color", "custom"):
            first, second = getattr(read, name), getattr(again, name)
            assert type(second) is type(first) and first is not second
            assert vars(origin_of(second)) == vars(origin_of(first))
        assert again.custom.value == 7 and again.color.arguments == read.color.arguments


@pytest.mark.parametrize("data", [b"", b"\x80", b"garbage", pickle.dumps([1, 2, 3])[:-3]])
def test_a_damaged_pickle_is_an_error_not_a_crash(data: bytes) -> None:
    with pytest.raises(UnsafePickleError, match="damaged"):
        safe_loads(data, "here")


def archive_of(value: object, folder: Path, before: bytes = b"") -> TorchArchive:
    """`torch.save` of a value, embedded behind other bytes, as in a `.distcp`."""
    stream = io.BytesIO()
    torch.save(value, stream)
    (folder / "data").write_bytes(before + stream.getvalue() + b"what comes next")
    return TorchArchive(FolderReader(folder), "data", len(before), len(stream.getvalue()))


@pytest.mark.parametrize("before", [b"", b"x" * 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_a_tensor_is_found_where_it_lies(dtype: torch.dtype, before: bytes, tmp_path: Path) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    archive = archive_of(tensor, tmp_path, before)
    reference = archive.load()
    assert isinstance(reference, TensorReference)
    payload = archive.locate(reference)
    raw = (tmp_path / "data").read_bytes()[payload.offset :][: payload.numel * dtype.itemsize]
    assert torch.equal(torch.frombuffer(bytearray(raw), dtype=dtype).reshape(payload.shape), tensor)
    archive.verify_checksums()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_an_intact_tensor_of_another_dtype_is_no_attack(dtype: torch.dtype, tmp_path: Path) -> None:
    archive = archive_of(torch.zeros(4, dtype=dtype), tmp_path)
    with pytest.raises(UnsupportedCheckpointError, match=f"(?s)dtype that is not supported.*{dtype}"):
        archive.load()


def test_a_tensor_that_is_not_contiguous_is_refused(tmp_path: Path) -> None:
    archive = archive_of(torch.arange(12).reshape(3, 4).t(), tmp_path)
    with pytest.raises(UnreadableCheckpointError, match="does not fit"):
        archive.locate(archive.load())


def test_a_flipped_byte_is_seen_by_the_checksums(tmp_path: Path) -> None:
    archive = archive_of(torch.arange(1000), tmp_path)
    offset = archive.locate(archive.load()).offset
    data = bytearray((tmp_path / "data").read_bytes())
    data[offset + 4001] ^= 1
    (tmp_path / "data").write_bytes(data)
    with pytest.raises(UnreadableCheckpointError, match="checksum differs"):
        archive.verify_checksums()


def test_every_truncation_of_an_archive_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(torch.arange(10), stream)
    data = stream.getvalue()
    for length in range(0, len(data), 7):
        (tmp_path / "data").write_bytes(data[:length])
        with pytest.raises((UnreadableCheckpointError, UnsafePickleError)):
            TorchArchive(FolderReader(tmp_path), "data").load()
        with pytest.raises(UnreadableCheckpointError):
            TorchArchive(FolderReader(tmp_path), "data", 0, len(data))


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret"])
def test_no_file_outside_of_the_folder_is_opened(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpointError, match="outside"):
        FolderReader(tmp_path).size(name)


def test_a_short_file_is_reported_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    with FolderReader(tmp_path) as reader, pytest.raises(UnreadableCheckpointError, match="5 bytes.*at least 12 bytes"):
        reader.read_into("file", 8, memoryview(bytearray(4)))


def test_unpickling_needs_no_megatron() -> None:
    """The real metadata and common state are read in a process that has no Megatron at all."""
    from tests.harness.checkpoints import fixture_named

    code = (
        "import sys; sys.modules['megatron'] = None; import mcore_ckpt_ext as m;"
        f"c = m.open_checkpoint({str(fixture_named('p10').run)!r});"
        "print(c.job.args['num_layers'], c.job.iteration(), 'torch.distributed.checkpoint' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4", "4", "False"]


def archived(members: list[tuple[str, bytes]], path: Path) -> TorchArchive:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns of a name that is there twice
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, content in members:
                archive.writestr(name, content)
    return TorchArchive(FolderReader(path.parent), path.name)


ONE, TWO = (pickle.dumps([number], 2) for number in (1, 2))


@pytest.mark.parametrize(
    "second", ["archive/data.pkl", "archive/DATA.pkl", "other/data.pkl", "other/version"], ids=lambda name: name
)
def test_an_archive_that_two_readers_read_differently_is_refused(second: str, tmp_path: Path) -> None:
    """Torch takes the first record of a name, the standard library the last."""
    with pytest.raises(UnreadableCheckpointError, match="more than one"):
        archived([("archive/data.pkl", ONE), (second, TWO)], tmp_path / "a.pt")


@pytest.mark.parametrize("order", [b"big", b"middle", b"little" * 40])
def test_another_order_of_bytes_is_refused(order: bytes, tmp_path: Path) -> None:
    archive = archived([("archive/data.pkl", ONE), ("archive/byteorder", order)], tmp_path / "a.pt")
    with pytest.raises(UnsupportedCheckpointError, match="order of bytes"):
        archive.load()
    assert archived([("archive/data.pkl", ONE), ("archive/byteorder", b"little")], tmp_path / "b.pt").load() == [1]


@pytest.mark.parametrize("mark", ["neg", "conj"])
def test_a_tensor_that_means_the_opposite_is_refused(mark: str, tmp_path: Path) -> None:
    """Views of complex tensors bear such marks, and torch honors them."""
    values = torch.tensor([1 + 2j, 3 - 1j])
    marked = values.conj().imag if mark == "neg" else values.conj()
    torch.save({"moment": marked}, tmp_path / "a.pt")
    with pytest.raises(UnsafePickleError), FolderReader(tmp_path) as reader:
        TorchArchive(reader, "a.pt").load()
    torch.save({"moment": marked.resolve_neg().clone() if mark == "neg" else marked.real.clone()}, tmp_path / "b.pt")
    with FolderReader(tmp_path) as reader:
        assert TorchArchive(reader, "b.pt").load()["moment"].shape == (2,)


@pytest.mark.parametrize(
    ("file", "entry"),
    [
        ("common.json", '"version": 99'),
        ("model.safetensors.index.json", '"weight_map": {}'),
        ("canonical-00001-of-00001.safetensors", '"weight.embedding.word_embeddings.weight": {}'),
    ],
)
def test_json_that_says_two_things_is_refused(file: str, entry: str, tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "run", mcore_ckpt_ext.Canonical())
    data = (tmp_path / "run" / file).read_bytes()
    begin = 8 if file.endswith(".safetensors") else 0
    changed = data[begin:].replace(b"{", b"{" + entry.encode() + b", ", 1)
    if begin:
        changed = (int.from_bytes(data[:8], "little") + len(entry) + 2).to_bytes(8, "little") + changed
    (without_digests(tmp_path / "run") / file).write_bytes(changed)
    with pytest.raises(UnreadableCheckpointError, match="two entries"):
        mcore_ckpt_ext.open_checkpoint(tmp_path / "run").names("weight")


def test_json_that_says_a_thing_twice_is_read() -> None:
    assert parse_json('{"a": 1, "a": 1, "b": {"a": 2}}') == {"a": 1, "b": {"a": 2}}


def test_a_nan_beside_a_repeated_key_is_no_contradiction() -> None:
    """It does not equal itself, and would be named in place of the key that has two values."""
    assert list(parse_json('{"a": NaN, "b": 1, "b": 1}')) == ["a", "b"]
    with pytest.raises(ValueError, match="two entries 'b'"):
        parse_json('{"a": NaN, "b": 1, "b": 2}')
