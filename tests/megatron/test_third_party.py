"""Test the adapters of loops that check the layout themselves: only that check is bypassed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from mcore_ckpt_ext.megatron.third_party import wrap_bridge_load, wrap_swift_load


class Distributed:
    """An optimizer as `third_party` recognizes it."""

    gbuf_ranges = ()


class DistributedOptimizer:
    checkpoint_fully_reshardable_formats = {"fully_reshardable"}


def bridge_load(load_dir: str, state: object, model: object, optimizer: object, strict: bool = True) -> bool:
    """Megatron-Bridge's check."""
    if load_dir == "raises":
        raise RuntimeError(load_dir)
    return "dp_reshardable" in DistributedOptimizer.checkpoint_fully_reshardable_formats


def swift_load(args: Namespace, ddp_models: list[Any], optimizer: object = None, scheduler: object = None) -> bool:
    """ms-swift's."""
    if ddp_models:
        raise RuntimeError("in the middle")
    return not args.use_distributed_optimizer


UNSERVED = [None, object()]


def test_bridge() -> None:
    load = wrap_bridge_load(bridge_load)
    assert load("run", None, [], Distributed())
    assert load("run", state=None, model=[], optimizer=Distributed(), strict=False)
    assert not any(load("run", None, [], optimizer) for optimizer in UNSERVED)
    with pytest.raises(RuntimeError):
        load("raises", None, [], Distributed())
    assert not bridge_load("run", None, [], None)  # the class is its own again


def test_swift() -> None:
    load, args = wrap_swift_load(swift_load), Namespace(use_distributed_optimizer=True)
    assert load(args, [], Distributed())
    assert load(args, ddp_models=[], optimizer=Distributed())
    assert not any(load(args, [], optimizer) for optimizer in UNSERVED)
    with pytest.raises(RuntimeError):
        load(args, ["chunk"], Distributed())
    assert args.use_distributed_optimizer


@pytest.mark.parametrize("wrap", [wrap_bridge_load, wrap_swift_load])
def test_names_and_parameters_stay(wrap: Callable[..., Any]) -> None:
    original = bridge_load if wrap is wrap_bridge_load else swift_load
    assert wrap(original).__name__ == original.__name__
