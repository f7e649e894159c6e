"""Test that each operation of a pickle costs what its size justifies, and that what picklers write is read."""

from __future__ import annotations

import argparse
import collections
import io
import itertools
import pickle
import random
import struct
import types

import pytest
import torch

from mcore_ckpt_ext.storage.safe_pickle import safe_loads
from mcore_ckpt_ext.storage.te_extra_state import UnknownStateError, read_state
from tests.harness.bounds import in_bounds

SECONDS = 2  # of processor time: one for the refusal, one for the machine
PRIME = (1 << 61) - 1  # numbers that are alike in their remainder of this have one hash
MEBIBYTE = 1 << 20


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%b%b" % (bytes([len(data)]), data)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


ALIKE = [number(PRIME * factor) for factor in range(9, 40_000)]
PAIRS = b"](" + b"".join(b"%bN\x86" % key for key in ALIKE) + b"e"
NUMBERS = b"](" + b"".join(ALIKE) + b"e"
ENDED = [b"J\xff\xff\xff\xff", b"J\xfe\xff\xff\xff"]  # -1 and -2 have one hash
TUPLES = b"".join(b"(%btN" % b"".join(signs) for signs in itertools.product(ENDED, repeat=14))
COMPLEX = b"".join(
    b"c__builtin__\ncomplex\nG%bG%b\x86RN" % (struct.pack(">d", 1000003.0 * -part), struct.pack(">d", part))
    for part in range(1, 20_000)
)
BYTES = b"B" + struct.pack("<I", MEBIBYTE) + b"a" * MEBIBYTE
STRING = text("a" * MEBIBYTE)
PUNYCODE = text("punycode")
LAUGHING = b")\x94" + b"".join(b"h%ch%c\x86\x94" % (level, level) for level in range(60))
ATTACKS = {
    "text by punycode": named("builtins", "str") + b"B" + struct.pack("<I", 900_000) + b"a" * 900_000 + PUNYCODE
    + b"\x86R",
    "text of a text": named("builtins", "str") + STRING + b"\x85R",
    "bytes by another codec": named("_codecs", "encode") + STRING + PUNYCODE + b"\x86R",
    "a byte array by another codec": named("builtins", "bytearray") + STRING + PUNYCODE + b"\x86R",
    "bytes by a codec, again and again": named("_codecs", "encode") + b"\x94" + STRING + b"\x94]("
    + b"h\x00h\x01X\x06\0\0\0latin1\x86R" * 20_000 + b"e",
    "an ordered dict of pairs": named("collections", "OrderedDict") + PAIRS + b"\x85R",
    "a dict of pairs": named("builtins", "dict") + PAIRS + b"\x85R",
    "a new dict of pairs": named("builtins", "dict") + PAIRS + b"\x85\x81",
    "a set of numbers": named("builtins", "set") + NUMBERS + b"\x85R",
    "a frozen set of numbers": named("__builtin__", "frozenset") + NUMBERS + b"\x85\x81",
    "a set by its opcodes": b"\x8f" + NUMBERS[1:-1] + b"\x90",
    "a frozen set by its opcodes": NUMBERS[1:-1] + b"\x91",
    "a default dict of pairs": named("collections", "defaultdict") + b"N" + PAIRS + b"\x86R",
    "a namespace of pairs": named("types", "SimpleNamespace") + PAIRS + b"\x85R",
    "items of a class": named("some", "Dict") + b")R(" + b"".join(b"%bN" % key for key in ALIKE) + b"u",
    "numbers as attributes": named("argparse", "Namespace") + b")\x81}("
    + b"".join(b"%bN" % key for key in ALIKE) + b"ub",
    "complex numbers of one hash": b"}(" + COMPLEX + b"u",
    "tuples of one hash": b"}(" + TUPLES + b"u",
    "tuples of one hash, one by one": b"}" + b"".join(b"%bs" % pair for pair in TUPLES.split(b"N") if pair).replace(
        b"ts", b"tNs"),
    "sets as keys": b"}(" + b"".join(b"(%b%b\x91N" % pair for pair in itertools.pairwise(ALIKE)) + b"u",
    "nested tuples in a set": named("builtins", "set") + b"]" + LAUGHING + b"a\x85R",
    "nested frozen sets": b")\x94" + b"".join(b"(h%ch%c)\x85\x91\x94" % (level, level) for level in range(60)),
    "keywords": named("some", "Thing") + b")}(" + b"".join(b"%bN" % key for key in ALIKE) + b"u\x92",
    "a large integer of a text": named("builtins", "int") + text("9" * 900_000) + b"\x85R",
    "a large integer in text": b"I" + b"9" * 900_000 + b"\n",
    "a large integer of Python 2": b"L" + b"9" * 900_000 + b"L\n",
    "a large integer": b"\x8b" + struct.pack("<I", MEBIBYTE) + b"\x7f" * MEBIBYTE,
    "a slice of a list": b"](KAe\x94" + (named("builtins", "slice") + b"K\x00K\x00N\x87Rh\x00s") * 60,
    "a slice of a byte array": named("builtins", "bytearray") + b"C\x02aa\x85R\x94"
    + (named("builtins", "slice") + b"K\x00K\x00N\x87Rh\x00s") * 60,
    "zeros": named("builtins", "bytearray") + b"J\xff\xff\xff\x7f\x85R",
    "a byte array of many": b"\x96" + struct.pack("<Q", 1 << 36),
    "a list of a list, again and again": named("builtins", "list") + b"\x94](" + b"N" * 100_000 + b"e\x94]("
    + b"h\x00h\x01\x85R" * 100_000 + b"e",
    "a tuple of a list, again and again": named("torch", "Size") + b"\x94](" + b"N" * 100_000 + b"e\x94]("
    + b"h\x00h\x01\x85R" * 100_000 + b"e",
    "a thing of a list, again and again": named("some", "Thing") + b"\x94(" + b"N" * 100_000 + b"t\x94]("
    + b"h\x00h\x01R" * 100_000 + b"e",
    "a stream of bytes": named("_io", "BytesIO") + b")\x81\x94" + BYTES + b"\x94](" + b"h\x00h\x01K\x00N\x87b" * 20_000
    + b"e",
    "classes": b"](" + b"".join(b"ca\nb%d\n" % count for count in range(100_000)) + b"e",
    "records": b"](" + b"".join(b"ctorch.distributed.checkpoint.metadata\nb%d\n" % count for count in range(30_000))
    + b"e",
    "a tensor of a list of sizes": named("torch._utils", "_rebuild_tensor_v2") + b"(NK\x00]("
    + b"K\x01" * 500_000 + b"e))N)tR",
    "a storage of many": b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0000X\x03\0\0\0cpu"
    + number(1 << 62) + b"tQ",
    "a tensor that was not made": named("torch._utils", "_rebuild_tensor_v2") + b")\x81",
    "the state of a function": named("torch._utils", "_rebuild_parameter") + b"N}X\x05\0\0\0_callNs\x86b",
    "the hooks of an object": named("some", "Thing") + b")\x81}X\x0c\0\0\0__setstate__cbuiltins\nset\nsb"
    + PAIRS + b"bK\x01a",
    "an extension": b"\x82\x01",
    "a function of functions": named("builtins", "getattr") + named("collections", "OrderedDict")
    + text("fromkeys") + b"\x86R",
    "a default of a default": named("collections", "defaultdict") + named("torch._utils", "_rebuild_parameter")
    + b"\x85R",
}  # fmt: skip
HARMLESS = {"the hooks of an object"}


@pytest.mark.thorough
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_within_a_second(attack: str) -> None:
    refused = in_bounds(lambda: safe_loads(b"\x80\x02" + ATTACKS[attack] + b".", "here"), SECONDS)
    assert refused.startswith(("OverBudgetError", "UnsafePickleError")) or attack in HARMLESS
    assert len(refused) < 1000


@pytest.mark.thorough
@pytest.mark.parametrize("attack", ["an ordered dict of pairs", "a set of numbers", "text by punycode"])
def test_the_attacks_would_take_long_with_the_standard_unpickler(attack: str) -> None:
    """Negative control: they end only because their processor time is limited."""
    with pytest.raises(AssertionError):
        in_bounds(lambda: pickle.loads(b"\x80\x02" + ATTACKS[attack] + b".", encoding="utf-8"), 1)


def test_a_file_within_a_file_within_a_file_is_refused() -> None:
    """Each level of an extra state would multiply the work by the references that it has."""
    data = b""
    for _ in range(4):
        archive = io.BytesIO()
        torch.save({}, archive)
        inner = b"B" + struct.pack("<I", len(data)) + data + b"\x94"
        data = (
            b"\x80\x04]("
            + named("torch.storage", "_load_from_bytes")
            + b"\x94"
            + inner
            + b"h\x00h\x01\x85R" * 99
            + b"e."
        )
    with pytest.raises(UnknownStateError):
        read_state(data)


VALUES = [
    {"a": 1, 2: "b", (3, "c", (4.5, None)): [True, b"bytes", bytearray(b"array")]},
    {1, 2, "three"},
    frozenset({(1, 2), "three"}),
    {frozenset({1}): complex(1, -2), 1 << 80: slice(1, None, 3)},
    collections.OrderedDict([("a", 1), ((0, 1), 2)]),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {3: 4}),
    collections.deque([1, 2], maxlen=3),
    collections.deque([1, 2]),
    types.SimpleNamespace(a=1, b=types.SimpleNamespace(c=[2])),
    argparse.Namespace(kinds=[int, float, str, bool, bytes], of=argparse.Namespace()),
    [b"", bytearray(), complex(0), set(), frozenset(), -(1 << 70), 1.5, (), "\N{SNOWMAN}"],
    random.Random(3).getstate(),
]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_picklers_write_is_read(value: object, protocol: int) -> None:
    """In the protocols of all releases of torch and of Megatron."""
    for pickler in (pickle.dumps, pickle._dumps):  # type: ignore[attr-defined]
        assert safe_loads(pickler(value, protocol), "here") == value


def test_attributes_of_a_state_dict_are_read() -> None:
    state = torch.nn.Linear(1, 1).state_dict()
    state.clear()
    loaded = safe_loads(pickle.dumps(state, 2), "here")
    assert vars(loaded) == vars(state) and loaded._metadata


def test_a_stream_is_read_where_it_stood() -> None:
    stream = io.BytesIO(b"some bytes")
    stream.seek(5)
    assert safe_loads(pickle.dumps(stream, 2), "here").read() == b"bytes"
