"""Test that the fast loader of plain pickles accepts only what the full one accepts, with the same result."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.storage.pickle_stubs import MetadataStub, Placeholder
from mcore_ckpt_ext.storage.plain_pickle import plain_form
from mcore_ckpt_ext.storage.safe_pickle import SafeUnpickler, _PlainUnpickler
from tests.fuzz import edits
from tests.harness.checkpoints import fixture_named


@pytest.mark.parametrize("name", ["p01", "p05", "p06", "p07", "p10", "p41", "p43", "p45", "p47", "p48", "p50"])
def test_a_real_index_is_plain_and_cheap(name: str) -> None:
    """The short way and the long one agree about it, and the short one is taken."""
    data = (fixture_named(name).iteration / ".metadata").read_bytes()
    plain = plain_form(data)
    assert plain is not None
    unpickler = SafeUnpickler(data, "here")
    assert described(_PlainUnpickler(plain, "here").load()) == described(unpickler.load())
    assert unpickler.position == len(data)


@pytest.mark.parametrize("name", ["p06", "p42"])
def test_the_two_ways_agree_about_indexes_that_were_changed(name: str) -> None:
    """What the short one loads, the long one, with its checks, loads too, as the same."""
    edited = edits.pickled((fixture_named(name).iteration / ".metadata").read_bytes())
    loaded = 0
    for seed in range(40):
        data = edited(edits.ByChance(seed))
        plain = plain_form(data)
        if plain is None:
            continue
        try:
            found = described(_PlainUnpickler(plain, "here").load())
        except Exception:  # damaged, or not plain
            continue
        loaded += 1
        assert found == described(SafeUnpickler(data, "here").load())
    assert loaded > 3


def described(tree: object) -> object:
    """What an index says, in a form that can be compared."""
    match tree:
        case MetadataStub():
            return type(tree).__name__, described(vars(tree))
        case Placeholder():
            return tree.pickled_module, tree.pickled_name, described(vars(tree)["arguments"])
        case dict():
            return [(described(key), described(value)) for key, value in tree.items()]
        case list() | tuple():
            return [type(tree).__name__, *map(described, tree)]
    return repr(tree)
