"""Gathering and strict loading where ColossalAI's GPU memory is a device that the CPU cannot touch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai_on_cpu import ranks

from mcore_ckpt_ext import zero_strict_state_dict as strict
from mcore_ckpt_ext.colossalai.wrapper import Place, Wrapped, inspect_wrapper
from mcore_ckpt_ext.errors import ResumeRefusedError
from tests.colossalai.jobs import PLACEMENTS, same_bits, train, wrap
from tests.colossalai.models import Everything
from tests.colossalai.on_device import on_device
from tests.harness.device import Counts, DeviceTensor
from tests.harness.device_group import BACKENDS_VARIABLE
from tests.harness.out_of_memory import Failure

RANKS = 2
FP32_BYTES = 4
LOAD_AGAIN = "it is partly written: do not train on, load again"


def trained(placement: str) -> tuple[Any, Any]:
    model, optimizer = wrap(Everything, ignore=("ignored",), **PLACEMENTS[placement])
    train(model, optimizer, range(2))
    return model, optimizer


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def elements(saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What an optimizer's state dict holds per element."""
    found = (
        (f"{key}.{name}", value) for key, state in saved["state"].items() for name, value in tensors(state).items()
    )
    return {name: value for name, value in found if value.dim()}


def nbytes(values: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors; of names of one tensor, once."""
    return sum({value.data_ptr(): value.nbytes for value in values}.values())


def held(places: Iterable[Place]) -> int:
    """Bytes that this rank holds of places on the device."""
    parts = (place.local()[0] for place in places)
    return sum(part.nbytes for part in parts if isinstance(part, DeviceTensor))


def loaded_beside_chunks(zero: Wrapped) -> int:
    """Bytes of what a state dict has for ignored and frozen parameters, and for buffers, as they are here."""
    kept = {id(value) for value in zero.module.state_dict(keep_vars=True).values()}
    return sum(one.nbytes for one in (*zero.outside, *zero.module.buffers()) if id(one) in kept)


@pytest.mark.thorough
@pytest.mark.parametrize("placement", ["static", "optimizer offload", "keep gathered"])
def test_gathering_and_loading_agree_with_the_cpu(placement: str) -> None:
    """Bit for bit, and what is stored crosses once; training continues alike with what was loaded."""

    def job() -> None:
        os.environ[BACKENDS_VARIABLE] = "cpu:gloo,cuda:nccl"  # messages between the ranks do not cross
        strict.install()
        model, optimizer = trained(placement)
        weights, saved = model.state_dict(), optimizer.state_dict()
        torch.manual_seed(5)
        others = Everything().state_dict()
        with on_device(model, optimizer) as counts:
            zero = inspect_wrapper(model)
            places = (*zero.masters.values(), *zero.working.values())
            chunks = {place.chunk for place in places}
            mask = FP32_BYTES * zero.module.mask.numel()  # not in the dict, but gathered with the other buffers
            # A chunk in CPU memory is sent over the device, its padding with it.
            payloads = [chunk.payload for chunk in {place.chunk for place in zero.masters.values()}]
            sent = sum(payload.nbytes for payload in payloads if not isinstance(payload, DeviceTensor))

            def crossed(call: Callable[[], Any]) -> tuple[Any, Counts]:
                before = dict(vars(counts))
                result = call()
                change = Counts(**{name: value - before[name] for name, value in vars(counts).items()})
                # A copy waits for the device, the check for NaN of a chunk, and a step that has come from rank 0.
                assert change.waits <= change.copies + len(chunks) + len(zero.names)
                return result, change

            found, change = crossed(model.state_dict)
            assert same_bits(tensors(found), tensors(weights))
            assert (change.to_cpu, change.to_device) == (nbytes(tensors(weights).values()) + mask * zero.is_first, sent)
            found, change = crossed(optimizer.state_dict)
            moments = elements(saved)
            assert same_bits(elements(found), moments)
            assert (change.to_cpu, change.to_device) == (nbytes(moments.values()), 2 * sent)
            _, change = crossed(lambda: model.load_state_dict(others))
            assert (change.to_cpu, change.to_device) == (0, held(places) + loaded_beside_chunks(zero))
            run_on_all = model.state_dict(device="cuda", only_rank_0=False)
            assert all(isinstance(value, DeviceTensor) for value in tensors(run_on_all).values())
            model.load_state_dict(run_on_all)
            model.load_state_dict(weights)
            _, change = crossed(lambda: optimizer.load_state_dict(saved))
            assert change.to_device == nbytes(moments.values()) + FP32_BYTES * len(saved["state"])
        assert train(model, optimizer, range(2, 4)) == train(*trained(placement), range(2, 4))

    ranks.run(RANKS, job)


@pytest.mark.parametrize("placement", ["static", "optimizer offload"])
def test_a_rank_without_memory_is_heard_by_all(placement: str) -> None:
    """Wherever it is: all ranks refuse alike, and nothing has changed, or the message says so."""

    def messages(failure: Failure, call: Callable[[], Any]) -> list[str]:
        """Call again and again, until no allocation is left that has not failed once on rank 1."""
        found: list[str] = []
        happened = [True] * RANKS
        while any(happened):
            failure.place = None
            try:
                failure.within(call) if dist.get_rank() == 1 else call()
            except ResumeRefusedError as error:
                found.append(str(error))
            dist.all_gather_object(happened, failure.place is not None)
        return found

    def job() -> dict[str, list[str]]:
        strict.install()
        model, optimizer = trained(placement)
        with on_device(model, optimizer):
            weights, saved = model.state_dict(), optimizer.state_dict()
            calls = {
                "gather": lambda: model.state_dict(only_rank_0=False, device="cuda"),
                "gather state": optimizer.state_dict,
                "load": lambda: model.load_state_dict(weights),
                "load state": lambda: optimizer.load_state_dict(saved),
            }
            return {name: messages(Failure(), call) for name, call in calls.items()}

    first, second = ranks.run(RANKS, job)
    assert first == second
    ends = {"gather": "no rank has a result", "gather state": "no rank has the whole state"}
    for call, found in first.items():
        assert found
        for message in found:
            assert ends.get(call, LOAD_AGAIN) in message or "nothing was gathered" in message
            assert "rank 1: OutOfMemoryError: CUDA out of memory" in message
