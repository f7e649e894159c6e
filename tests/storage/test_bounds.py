"""Test limits of work and memory by input size: small pickles and indexes that claim gigabytes, or never end."""

from __future__ import annotations

import itertools
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsafePickleError, format_value
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.storage.budget import MOST_ELEMENTS, Budget, OverBudgetError, check_keys, checked_numel
from mcore_ckpt_ext.storage.dcp_index import read_index
from mcore_ckpt_ext.storage.dcp_metadata import index_of
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.json_tree import decode
from mcore_ckpt_ext.storage.pickle_stubs import metadata_class
from mcore_ckpt_ext.storage.plain_pickle import plain_form
from mcore_ckpt_ext.storage.safe_pickle import _NotPlainError, _PlainUnpickler, safe_loads
from mcore_ckpt_ext.storage.torch_archive import TorchArchive
from tests.harness.bounds import in_bounds
from tests.harness.checkpoints import fixture_named

LEVELS = 45


def pickled_bomb(begin: bytes, end: bytes, levels: int = LEVELS) -> bytes:
    """A tuple of two references to a tuple of two references, and so on."""
    references = b"".join(b"h%bh%b\x86\x94" % (bytes([level]), bytes([level])) for level in range(levels))
    return b"\x80\x04" + begin + b")\x94" + references + end


def pickled_lists(begin: bytes, end: bytes, levels: int = LEVELS) -> bytes:
    references = b"".join(b"]\x94(h%bh%be" % (bytes([level]), bytes([level])) for level in range(levels))
    return b"\x80\x04" + begin + b"]\x94" + references + end


MEBIBYTE = 1 << 20
COPIES = b"\x80\x04cbuiltins\nbytearray\n\x94B" + struct.pack("<I", MEBIBYTE) + b"a" * MEBIBYTE + b"\x94]("
PICKLES = {
    "a key": pickled_bomb(b"}", b"Ns."),
    "a key among others": pickled_bomb(b"}(", b"Nu."),
    "in a set": pickled_bomb(b"\x8f(", b"\x90."),
    "a frozen set": pickled_bomb(b"(", b"\x91."),
    "of a call": pickled_bomb(b"cbuiltins\nset\n(", b"t\x85R."),
    "copies": COPIES + b"h\x00h\x01\x85R" * 20_000 + b"e.",
    "states": b"\x80\x04}\x94(" + b"".join(b"X\x04\x00\x00\x00%04dN" % n for n in range(9999)) + b"u]("
    + b"cargparse\nNamespace\n)\x81h\x00b" * 9999 + b"e.",
}  # fmt: skip
DEEP = b")" + b"\x85" * MEBIBYTE
LARGE = b"\x8b" + struct.pack("<I", MEBIBYTE) + b"\x7f" * MEBIBYTE


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        (b"\x80\x04}" + DEEP + b"Ns.", "OverBudgetError"),
        (b"\x80\x04(" + DEEP + b"\x91.", "OverBudgetError"),
        (b"\x80\x04" + LARGE + b"\x94h\x00\x86.", "UnsafePickleError: a pickle is damaged"),
    ],
    ids=["a key", "in a set", "a whole number"],
)
def test_inputs_that_would_crash_or_stall_are_refused(data: bytes, refused: str) -> None:
    """Python hashes tuples of tuples by recursion without a limit, and remembers no hash of a whole number."""
    assert in_bounds(lambda: safe_loads(data, "here")).startswith(refused)


PRIME = (1 << 61) - 1  # Python's hash of a whole number is its remainder of this


def alike(count: int) -> list[int]:
    """Whole numbers of one hash."""
    return [number * PRIME for number in range(9, 9 + count)]


def test_keys_of_one_hash_are_refused() -> None:
    """To put 40,000 of them into a dict takes thirteen seconds, four times as long for twice as many."""
    many = dict.fromkeys(range(9), "few") | {(0, number): None for number in alike(400)}
    assert safe_loads(pickle.dumps(many), "here") == many
    numbers = b"".join(b"\x8a\x0a%bN" % number.to_bytes(10, "little") for number in alike(40_000))
    assert in_bounds(lambda: safe_loads(b"\x80\x04}(" + numbers + b"u.", "here")).startswith("OverBudgetError")
    pairs = [[number, None] for number in alike(40_000)]
    for described in ({"$dict": pairs}, {"$set": alike(40_000)}, {"$ordered": pairs}):
        assert "40,000 keys that have one hash" in in_bounds(lambda described=described: decode(described))


def of_one_hash(count: int) -> Iterator[bytes]:
    """Tuples of -1 and -2, which have one hash, in all orders."""
    for number in range(1 << count):
        yield b"(%bt" % b"".join(b"J%b" % struct.pack("<i", -1 - (number >> bit & 1)) for bit in range(count))


THING, SIZE = (b"\x8c\x05torch\x8c%b%b\x93\x94" % (bytes([len(name)]), name) for name in (b"Thing", b"Size"))
PROPERTIES = b"\x8c\x1ctorch.distributed.checkpoint\x8c\x10TensorProperties\x93\x94"
LOOKS_PLAIN = {
    "tuples": b"}(" + b"".join(b"%bN" % key for key in of_one_hash(14)) + b"u",
    "sizes": SIZE + b"}(" + b"".join(b"h\x00%b\x85RN" % key for key in of_one_hash(14)) + b"ue",
    "states": PROPERTIES + b"".join(b"h\x00)\x81%b\x94b" % key for key in of_one_hash(14))
    + b"}(" + b"".join(b"j%bN" % struct.pack("<I", 1 + number) for number in range(1 << 14)) + b"ue",
    "states of states": THING + b")\x94" + b"".join(b"h\x00)\x81(h%ch%ct\x94b" % (n, n) for n in range(1, LEVELS))
    + b"}h%cNs" % LEVELS + b"e",
}  # fmt: skip


@pytest.mark.parametrize("attack", LOOKS_PLAIN)
def test_a_pickle_that_only_looks_plain_is_refused(attack: str) -> None:
    body = LOOKS_PLAIN[attack]
    data = b"\x80\x04" + (b"](" + body if body.endswith(b"e") else body) + b"."
    assert plain_form(data) is not None
    assert in_bounds(lambda: safe_loads(data, "here")).startswith(("OverBudgetError", "UnsafePickleError"))


def test_an_index_whose_offsets_have_one_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="300 keys that have one hash"):
        check_keys([("weight", (number,)) for number in alike(300)])
    check_keys([("weight", (number,)) for number in range(300)])


def test_an_index_whose_records_have_one_hash_is_refused() -> None:
    """-1 and -2 have one hash; whether an offset is within its array is checked later."""
    offsets = list(itertools.product((-1, -2), repeat=9))
    records = [metadata_class("MetadataIndex")() for _ in offsets]
    for record, offset in zip(records, offsets, strict=True):
        record.__setstate__({"fqn": "weight", "offset": offset})
    with pytest.raises(ValueError, match="512 keys that have one hash"):
        index_of(SimpleNamespace(storage_data=dict.fromkeys(records), state_dict_metadata={}))


@pytest.mark.parametrize("offset", [((1,),), (1 << 62,), ("text",)], ids=["a tuple", "a large number", "a text"])
def test_an_offset_that_no_array_has_is_refused(offset: object, tmp_path: Path) -> None:
    """It would be hashed for every record."""
    iteration = fixture_named("p01").copy_to(tmp_path / "p01").iteration
    metadata = pickle.loads((iteration / ".metadata").read_bytes())  # torch's own classes: a file of these tests
    next(index for index in metadata.storage_data if index.offset).__dict__["offset"] = offset
    (iteration / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnreadableCheckpointError, match="damaged; found: (TypeError: '>='|ValueError: a record)"):
        read_index(iteration)


@pytest.mark.parametrize("attack", PICKLES)
def test_a_pickle_that_costs_more_than_it_holds_is_refused(attack: str) -> None:
    assert in_bounds(lambda: safe_loads(PICKLES[attack], "here")).startswith("OverBudgetError")


@pytest.mark.parametrize(
    "data",
    [
        pickled_lists(b"cbuiltins\nbytearray\n", b"\x85R."),
        pickled_lists(b"cbuiltins\ngetattr\n", b"X\x01\x00\x00\x00a\x86R."),
        pickled_lists(b"ctorch._tensor\n_rebuild_from_type_v2\n(", b"N)NtR."),
        pickled_lists(b"(", b"tQ."),
    ],
)
def test_a_message_shortens_untrusted_text(data: bytes) -> None:
    said = in_bounds(lambda: safe_loads(data, "here"))
    assert said
    assert len(said) < 1000


def test_formatted_values_are_short() -> None:
    tree: object = []
    for _ in range(200):
        tree = [tree, tree, {"a": tree}]
    circular: list[object] = []
    circular.append(circular)
    for value in (tree, circular, "a" * 10**6, 10**5000, [10**5000] * 10**5, {b"x" * 10**6: tree}):
        assert len(format_value(value)) < 10_000
    assert format_value([1, ("a",), {"b": None}]) == "[1, ('a',), {'b': None}]"
    assert [format_value(value) for value in ([[[1]]], [[[[1]]]])] == ["[[[1]]]", "[[[[...]]]]"]


def test_an_index_with_a_key_of_nested_tuples_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickled_bomb(b"}", b"Ns."))
    assert in_bounds(lambda: read_index(tmp_path)).startswith("OverBudgetError")


@pytest.mark.parametrize(
    ("shape", "said"),
    [((10**7, 1), "the layers and experts of decoder"), ((1 << 62, 8), "is damaged"), ((1 << 62, 0), "is damaged")],
)
def test_an_array_of_many_layers_without_chunks_is_refused(shape: tuple[int, ...], said: str, tmp_path: Path) -> None:
    iteration = fixture_named("p01").copy_to(tmp_path / "p01").iteration
    metadata = pickle.loads((iteration / ".metadata").read_bytes())  # torch's own classes: a file of these tests
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), [])
    metadata.state_dict_metadata["decoder.layers.mlp.another.weight"] = entry
    (iteration / ".metadata").write_bytes(pickle.dumps(metadata))
    assert said in in_bounds(lambda: open_checkpoint(iteration).names("weight"))


def views(count: int, *, shared: bool) -> object:
    """References to one tensor of a mebibyte, or views of its storage that differ."""
    whole = torch.zeros(1 << 18)
    return [whole] * count if shared else [whole[number:] for number in range(count)]


def test_a_tensor_is_read_once_however_often_it_is_referred_to(tmp_path: Path) -> None:
    torch.save(views(1500, shared=True), tmp_path / "a.pt")
    with FolderReader(tmp_path) as reader:
        archive = TorchArchive(reader, "a.pt")
        values = archive.with_values(archive.load())
        assert len(values) == 1500
        assert len({tensor.data_ptr() for tensor in values}) == 1
        assert reader.bytes_read < 3 * MEBIBYTE  # and once more to compare its checksum


def test_many_views_of_one_tensor_are_refused(tmp_path: Path) -> None:
    torch.save(views(1500, shared=False), tmp_path / "a.pt")
    with FolderReader(tmp_path) as reader, pytest.raises(OverBudgetError, match="copies of its tensors"):
        archive = TorchArchive(reader, "a.pt")
        archive.with_values(archive.load())


def test_a_storage_is_of_a_type_of_storages() -> None:
    """Whatever has a dtype is not one: a namespace could name `qint8`."""
    namespace = b"cargparse\nNamespace\n)\x81}X\x05\x00\x00\x00dtypectorch\nqint8\nsb"
    data = b"\x80\x02(X\x07\x00\x00\x00storage" + namespace + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ."
    with pytest.raises(UnsafePickleError, match="not a storage"):
        safe_loads(data, "here")


def test_a_budget_grows_with_the_bytes_read() -> None:
    small, large = Budget(100, "here"), Budget(1 << 20, "there")
    large.spend(1 << 24, "work")
    with pytest.raises(OverBudgetError, match=r"found: more than .* for work; expected: .*100 bytes.*: here.*hint"):
        small.spend(1 << 24, "work")


def test_elements_are_counted_of_shapes_that_can_be() -> None:
    assert checked_numel((3, 4, 0)) == 0
    assert checked_numel(()) == 1
    for shape in ((MOST_ELEMENTS,), (True,), (1 << 55, 1 << 55), (1,) * 65):
        with pytest.raises(ValueError, match="an array"):
            checked_numel(shape)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04)\x94h\x00\x85\x94h\x01\x85.",
        b"\x80\x04K\x01\x85\x94(h\x00h\x00t.",
        b"\x80\x04]\x94(" + b"h\x00" * 65 + b"t.",
        b"\x80\x04\x8c\x05torch\x8c\x04Size\x93]\x85R.",
        b"\x80\x04\x8c\x05parts\x8c\x05Thing\x93)\x81}(" + b"".join(b"K%cN" % n for n in range(65)) + b"ub.",
    ],
    ids=["a tuple of a tuple of a tuple", "a tuple of two tuples", "a long one", "a size of a list", "a large state"],
)
def test_pickles_that_are_not_plain_are_read_by_the_slow_path(data: bytes) -> None:
    plain = plain_form(data)
    assert plain is not None
    with pytest.raises(_NotPlainError):
        _PlainUnpickler(plain, "here").load()
    safe_loads(data, "here")


def test_a_tuple_of_one_large_number_is_plain_as_it_is() -> None:
    """No two of them have one hash, so that nothing has to check them; two numbers in a tuple can be chosen to have."""
    alone = [(1 << 32,), (-(1 << 40),), ((1 << 54) - 1,), ((PRIME >> 7,),)]
    data = pickle.dumps(alone)
    assert plain_form(data) is data
    assert safe_loads(data, "here") == alone
    for other in ((1 << 32, 1), (1 << 62,), (((1 << 32,),),)):
        assert plain_form(pickle.dumps([other])) != pickle.dumps([other])


@pytest.mark.parametrize("protocol", [4, 5])
def test_frames_may_begin_between_any_two_opcodes(protocol: int) -> None:
    rows = {f"key {row}": [(row, row * 70_000, -row), ("text", None, True)] for row in range(20_000)}
    data = pickle.dumps(rows, protocol)
    assert data.count(b"\x95") > 5
    assert safe_loads(data, "here") == rows


def test_a_frame_within_an_argument_is_not_plain() -> None:
    """Left out, it would show other opcodes than the unpickler sees."""
    assert plain_form(b"\x80\x04\x95\x02\0\0\0\0\0\0\0K\x01.")
    assert not plain_form(b"\x80\x04\x95\x01\0\0\0\0\0\0\0M\x95\x02\0\0\0\0\0\0\0K\x01.")


@pytest.mark.parametrize("end", [b"h\x00h\x00\x86\x940.", b"2\x86.", b")R.", b"NQ.", b"h\x00)R.", b"h\x00(\x81."])
def test_hooks_with_code_of_their_own_are_not_plain(end: bytes) -> None:
    assert plain_form(b"\x80\x04)\x94" + end) is None
