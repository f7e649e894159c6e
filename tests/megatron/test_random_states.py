"""Test the random states of a sharded state dict, with Megatron's own classes."""

from __future__ import annotations

from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject

from mcore_ckpt_ext.megatron.random_states import grids_in, with_live_random_states


def test_random_states_are_found_in_a_tree() -> None:
    states = ShardedObject("rng_state", ["live"], (2, 1, 2), (0, 0, 1))
    extra = ShardedObject("decoder.layers.0._extra_state", None, (1,), (0,))
    assert list(grids_in({"model": extra, "trainer": [{"rng_state": states}]})) == [(2, 1, 2)]
    assert list(grids_in({"model": extra})) == []


def test_live_random_states_replace_requested_ones() -> None:
    """The tree that was given, and all else in it, stay as they are."""
    states = ShardedObject("rng_state", ["live"], (2, 1), (0, 0))
    tree = {"model": {"weight": object()}, "trainer": [{"rng_state": states}, "other"]}
    found = with_live_random_states(tree)
    kept = found["trainer"][0]["rng_state"]
    assert isinstance(kept, LocalNonpersistentObject)
    assert kept.unwrap() == ["live"]
    assert found["model"] is tree["model"]
    assert tree["trainer"][0] == {"rng_state": states}
