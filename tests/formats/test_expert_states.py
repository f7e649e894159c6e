"""Tests extra states of experts: converted between one for each expert and one for all."""

from __future__ import annotations

import copy
import enum
import io
import pickle
import sys
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from mcore_ckpt_ext.formats.expert_states import (
    carried_state,
    content_of,
    emptied_state,
    grouped_experts,
    joined_state,
    scaling_of,
    split_state,
    states_of_experts,
)
from mcore_ckpt_ext.formats.portable_state import writable_extra_states
from mcore_ckpt_ext.storage.archive_writer import archive_of
from mcore_ckpt_ext.storage.te_extra_state import UnknownStateError, read_state

LAYER = "decoder.layers.1.mlp.experts"
GROUPED = f"{LAYER}.linear_fc1._extra_state"
OTHER = "decoder.layers.1.self_attention.linear_qkv._extra_state"
LENGTH, EXPERTS = 4, 3
EMPTY = torch.empty(0, dtype=torch.uint8)


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provide classes with Transformer Engine's names, so that they can be pickled."""
    module = types.ModuleType("transformer_engine.common.recipe")
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class _FormatHelper(NamedTuple):
        max_fwd: float
        max_bwd: float

    class Format(enum.Enum):
        HYBRID = _FormatHelper(448, 57344)

    @dataclass
    class DelayedScaling:
        margin: int = 0
        fp8_format: Any = Format.HYBRID
        _cached_repr: str | None = None

    for kind in (_FormatHelper, Format, DelayedScaling):
        kind.__module__, kind.__qualname__ = module.__name__, kind.__name__
        setattr(module, kind.__name__, kind)
    return module


def content(recipe: Any, experts: int = EXPERTS, **more: Any) -> dict[str, Any]:
    """Return the state of a grouped linear layer; the hundreds of each element are the expert's number."""

    def numbers(*shape: int) -> torch.Tensor:
        of_experts = 100.0 * torch.arange(experts)
        return (torch.arange(float(torch.Size(shape).numel())).view(*shape, 1) + of_experts).flatten(-2)

    return {
        "recipe": recipe.DelayedScaling(),
        "scale_fwd": numbers(3), "amax_history_fwd": numbers(LENGTH, 3),
        "scale_bwd": numbers(2), "amax_history_bwd": numbers(LENGTH, 2),
        "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": experts, "names": ["a", ("b",)]},
        **more,
    }  # fmt: skip


def as_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_stream(found: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(found, stream)
    return stream


def pickled(found: Any) -> torch.Tensor:
    return as_bytes(pickle.dumps(found))


def test_each_expert_gets_its_own_numbers(recipe: Any) -> None:
    """The values of an expert are `view(length, places, experts)[:, :, expert]`, as in Megatron."""
    whole = content(recipe)
    for number, state in enumerate(split_state(pickled(whole), EXPERTS)):
        found = pickle.loads(content_of(state) or b"")
        for name, places in (("fwd", 3), ("bwd", 2)):
            assert torch.equal(found[f"scale_{name}"], whole[f"scale_{name}"].view(places, -1)[:, number])
            history = whole[f"amax_history_{name}"].view(LENGTH, places, -1)[:, :, number]
            assert torch.equal(found[f"amax_history_{name}"], history)
        assert found["extra_fp8_variables"] == {**whole["extra_fp8_variables"], "num_gemms": 1}
        assert found["recipe"] == whole["recipe"]


def test_split_and_joined_it_is_what_it_was(recipe: Any) -> None:
    whole = content(recipe)
    state = joined_state(split_state(pickled(whole), EXPERTS))
    found = pickle.loads(content_of(state) or b"")
    assert found.keys() == whole.keys()
    assert (found["recipe"], found["extra_fp8_variables"]) == (whole["recipe"], whole["extra_fp8_variables"])
    assert all(torch.equal(found[name], values) for name, values in scaling_of(pickled(whole)).items())
    assert len(scaling_of(state)) == 4


def test_views_of_a_larger_storage_are_read(recipe: Any) -> None:
    """Megatron pickles views of a larger storage."""
    whole = content(recipe)
    view = whole["amax_history_fwd"].view(LENGTH, 3, EXPERTS)[:, :, 1]
    assert torch.equal(scaling_of(pickled({"amax_history_fwd": view}))["amax_history_fwd"], view)


def test_streams_of_1_x(recipe: Any) -> None:
    whole = {name: values for name, values in content(recipe).items() if name != "recipe"}
    stream = as_stream({**whole, "scale_inv_fwd": whole["scale_fwd"]})
    state = joined_state(split_state(stream, EXPERTS))
    assert isinstance(state, io.BytesIO)
    found = torch.load(state, weights_only=True)
    assert torch.equal(found["scale_inv_fwd"], whole["scale_fwd"])
    assert found["extra_fp8_variables"] == whole["extra_fp8_variables"]


@pytest.mark.parametrize("stream", [True, False])
def test_long_histories_of_many_experts(stream: bool) -> None:
    """Transformer Engine's default is 1,024; joined states can be split again."""
    whole = {"amax_history_fwd": torch.rand(1024, 3 * 64), "extra_fp8_variables": {"num_gemms": 64}}
    state = as_stream(whole) if stream else pickled(whole)
    for _ in range(2):
        state = joined_state(split_state(state, 64))
    assert torch.equal(scaling_of(state)["amax_history_fwd"], whole["amax_history_fwd"])


def test_writing_is_deterministic(recipe: Any) -> None:
    state = pickled(content(recipe))
    assert content_of(carried_state(state)) == content_of(carried_state(state.clone()))


def test_without_fp8_each_expert_has_the_state_of_all() -> None:
    assert split_state(EMPTY, 3) == [EMPTY] * 3
    assert joined_state([EMPTY] * 3) is EMPTY
    names = grouped_experts(GROUPED, range(2, 4))
    assert names == [f"{LAYER}.experts.{number}.linear_fc1._extra_state" for number in (2, 3)]
    assert grouped_experts(OTHER, range(2)) == []


@pytest.mark.parametrize("changes", [{"scale_fwd": torch.zeros(4)}, {"extra_fp8_variables": {"num_gemms": 2}}])
def test_another_number_of_experts_is_refused(changes: dict[str, Any], recipe: Any) -> None:
    with pytest.raises(UnknownStateError, match="3 experts"):
        split_state(pickled(content(recipe, **changes)), EXPERTS)


def test_experts_that_cannot_have_one_state(recipe: Any) -> None:
    one, other = split_state(pickled(content(recipe, 2)), 2)
    longer = pickled(content(recipe, 1, scale_fwd=torch.zeros(6)))
    with pytest.raises(UnknownStateError, match="some experts, and none of others"):
        joined_state([one, EMPTY])
    with pytest.raises(UnknownStateError, match="scale_fwd are of different shapes"):
        joined_state([one, longer])
    with pytest.raises(UnknownStateError, match="different fp8 recipes"):
        joined_state([one, pickled(content(recipe, 1) | {"recipe": recipe.DelayedScaling(margin=1)})])
    remembered = pickled(content(recipe, 1) | {"recipe": recipe.DelayedScaling(_cached_repr="margin=0")})
    assert joined_state([one, other, remembered]) is not None


def test_states_of_all_that_could_not_be_split_are_emptied() -> None:
    found, (note,) = states_of_experts({GROUPED: as_bytes(b"\1"), OTHER: as_bytes(b"\2")}, 2)
    assert [content_of(state) for state in found.values()] == [b"", b"", b"\2"]
    assert note.startswith("extra states of 1 module are written empty, because one stored state covers several")


@pytest.mark.parametrize("state", [io.BytesIO(b"scales"), as_bytes(b"scales")])
def test_an_emptied_state_is_of_the_same_type(state: Any) -> None:
    found = emptied_state(state)
    assert type(found) is type(state)
    if isinstance(found, io.BytesIO):
        assert torch.load(found, weights_only=True) is None


class Runs:
    """An object that is pickled as a call."""

    def __init__(self, call: Any = print, *arguments: Any) -> None:
        self.call = call, arguments or ("run",)

    def __reduce__(self) -> Any:
        return self.call


def from_bytes(data: bytes) -> Runs:
    return Runs(torch.storage._load_from_bytes, data)


HOSTILE: dict[str, Callable[[Any], Any]] = {
    "a call": lambda recipe: Runs(),
    "a call among settings": lambda recipe: recipe.DelayedScaling(margin=Runs()),
    "a function": lambda recipe: recipe.DelayedScaling(margin=print),
    "a call in a storage": lambda recipe: from_bytes(pickle.dumps(Runs())),
    "a call in an archive": lambda recipe: from_bytes(saved(Runs())),
    "more after a storage": lambda recipe: from_bytes(oldest(torch.zeros(2)) + b"\0"),
    "a storage cut off": lambda recipe: from_bytes(oldest(torch.zeros(2))[:-1]),
    "bytes of a dict": lambda recipe: from_bytes(archive_of({})),
    "a tensor beyond its storage": lambda recipe: Runs(
        torch._utils._rebuild_tensor_v2, from_bytes(oldest(torch.zeros(2))), 1, (2,), (1,), False, {}
    ),
    "a tensor of one element, a billion times": lambda recipe: Runs(
        torch._utils._rebuild_tensor_v2, from_bytes(oldest(torch.zeros(2))), 0, (1 << 30,), (0,), False, {}
    ),
    "elements upon each other": lambda recipe: Runs(
        torch._utils._rebuild_tensor_v2, from_bytes(oldest(torch.zeros(8))), 0, (2, 2, 2, 2), (1, 1, 1, 1), False, {}
    ),
    "a compressed archive": lambda recipe: from_bytes(archived(torch.zeros(9), zipfile.ZIP_DEFLATED)),
    "records upon each other": lambda recipe: from_bytes(archived(torch.zeros(9), zipfile.ZIP_STORED, copies=9)),
    "an attribute": lambda recipe: Runs(getattr, recipe.Format, "__class__"),
}


def oldest(values: torch.Tensor) -> bytes:
    """Return a storage in torch's oldest format, as in a pickled tensor."""
    typed = torch.storage.TypedStorage(wrap_storage=values.untyped_storage(), dtype=values.dtype, _internal=True)
    return saved(typed, _use_new_zipfile_serialization=False)


def archived(found: Any, compression: int, copies: int = 0) -> bytes:
    """Return a torch archive with some compression, whose directory repeats the last record."""
    content = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(found))) as source, zipfile.ZipFile(content, "w", compression) as target:
        for record in source.infolist():
            target.writestr(record.filename, source.read(record))
        last = target.infolist()[-1]
        for number in range(copies):
            again = copy.copy(last)
            again.filename = f"{last.filename}{number}"
            target.filelist.append(again)
    return content.getvalue()


def saved(found: Any, **how: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(found, stream, **how)
    return stream.getvalue()


@pytest.mark.parametrize("name", HOSTILE)
def test_pickled_code_is_not_written(name: str, recipe: Any) -> None:
    state = as_bytes(pickle.dumps({"scale_fwd": HOSTILE[name](recipe)}))
    with pytest.raises(UnknownStateError):
        read_state(content_of(state) or b"")
    found, (note,) = writable_extra_states({OTHER: state})
    assert content_of(found[OTHER]) == b""
    assert "with other classes" in note


def test_many_copies_of_one_storage_are_not_made() -> None:
    """Each tensor is a transposed view, which would be copied."""
    shared, rebuild = from_bytes(oldest(torch.zeros(1 << 18))), torch._utils._rebuild_tensor_v2
    views = [Runs(rebuild, shared, 0, (512, 512), (1, 512), False, {}) for _ in range(5000)]
    with pytest.raises(UnknownStateError, match="OverBudgetError"):
        read_state(pickle.dumps({"scale_fwd": views}))


def test_a_member_as_python_3_11_pickles_it(recipe: Any) -> None:
    hybrid = Runs(getattr, recipe.Format, "HYBRID")
    state = carried_state(pickled({"recipe": recipe.DelayedScaling(fp8_format=hybrid)}))
    assert pickle.loads(content_of(state) or b"")["recipe"] == recipe.DelayedScaling()
