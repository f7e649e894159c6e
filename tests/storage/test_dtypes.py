"""Test torch's dtypes by name, without torch."""

from __future__ import annotations

import copy
import pickle
from argparse import Namespace

import torch

from mcore_ckpt_ext.storage.dtypes import DTYPE_NAMES, dtype_named, with_torch_dtypes
from mcore_ckpt_ext.storage.json_tree import decode, encode
from mcore_ckpt_ext.storage.pickling import dumps
from mcore_ckpt_ext.storage.safe_pickle import safe_loads


def test_names_and_sizes_are_those_of_torch() -> None:
    found = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype) and name != "bit"}
    assert found.keys() <= DTYPE_NAMES
    for name, value in found.items():
        assert dtype_named(name).torch is value
        assert dtype_named(name).itemsize == value.itemsize
        assert repr(dtype_named(name)) == repr(value)


def test_a_pickled_dtype_becomes_its_name_and_is_written_back() -> None:
    state = {"params_dtype": torch.bfloat16, ("key", torch.half): [torch.bfloat16]}
    found = safe_loads(pickle.dumps(state, 2), "here")
    assert found["params_dtype"] is found[("key", dtype_named("float16"))][0] is dtype_named("bfloat16")
    assert dumps(found)[0] == dumps(state)[0]
    assert decode(encode(found)) == found
    assert encode(found) == encode(state)


def test_copies_are_the_one_object_of_the_name() -> None:
    float32 = dtype_named("float32")
    assert copy.deepcopy([float32])[0] is pickle.loads(pickle.dumps(float32)) is float32


def test_frameworks_get_torch_s_own() -> None:
    state = {"args": Namespace(params_dtype=dtype_named("float16"), other=1), "list": [(dtype_named("int8"),), "text"]}
    assert with_torch_dtypes(state) == {
        "args": Namespace(params_dtype=torch.float16, other=1),
        "list": [(torch.int8,), "text"],
    }
