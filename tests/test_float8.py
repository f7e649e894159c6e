"""Test pickled Float8Tensors of Transformer Engine: they are read as data, without copying their numbers."""

from __future__ import annotations

import enum
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.planning.array_location import ArchivedTensor
from mcore_ckpt_ext.planning.overlap import Runs
from mcore_ckpt_ext.planning.plan import PlannedRead
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.transfer import Transfer

ENGINE = "transformer_engine.pytorch"
VALUES = torch.tensor([[1.5, -2.0, 448.0], [0.0, -0.25, 3.0]])
SCALE = 0.037


class Pickled:
    """Pickled as the call that would make it."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call = call, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Functions and classes of these names, so that they can be pickled; what they do is nobody's business here."""
    tensors, constants = (types.ModuleType(f"{ENGINE}.{name}") for name in ("tensor.float8_tensor", "constants"))
    above = [types.ModuleType(name) for name in ("transformer_engine", ENGINE, f"{ENGINE}.tensor")]
    for module in (*above, tensors, constants):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def make(*_: Any) -> None:
        """Stand for the module's own function."""

    def named(name: str) -> types.FunctionType:
        function = types.FunctionType(make.__code__, {}, name)
        function.__module__, function.__qualname__ = tensors.__name__, name
        setattr(tensors, name, function)
        return function

    functions = [named(f"_make_{kind}_tensor_in_reduce_ex") for kind in ("float8", "mxfp8")]
    method = "_make_in_reduce_ex"
    tensor_class = type("Float8Tensor", (), {method: classmethod(named(method)), "__module__": tensors.__name__})
    numbers = enum.IntEnum("DType", {"kFloat8E4M3": 7, "kFloat8E5M2": 8}, module=constants.__name__)
    tensors.Float8Tensor, constants.DType = tensor_class, numbers  # type: ignore[attr-defined]
    bound = getattr(tensor_class, method)
    return types.SimpleNamespace(function=functions[0], other=functions[1], method=bound, dtype=numbers)


def stored(folder: Path, pickled: object) -> tuple[Transfer, ArchivedTensor]:
    torch.save(pickled, folder / "file")
    length = (folder / "file").stat().st_size
    return Transfer(FolderReader(folder)), ArchivedTensor("file", 0, length, "bfloat16", VALUES.shape)


def elements(dtype: torch.dtype) -> torch.Tensor:
    return VALUES.to(dtype).view(torch.uint8)


@pytest.mark.parametrize("way", ["function", "method"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_are_multiplied_by_their_scale(
    engine: types.SimpleNamespace, way: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    number = engine.dtype(7 if dtype == torch.float8_e4m3fn else 8)
    scale = torch.tensor([SCALE])
    pickled = Pickled(getattr(engine, way), elements(dtype), number, scale, torch.bfloat16, VALUES.shape)
    transfer, extent = stored(tmp_path, pickled)
    expected = (VALUES.to(dtype).float() * scale).bfloat16()
    last_two_of_each_row = Runs(*(np.array([number]) for number in (1, 0, 2, 2, 3, 2)))
    (block,) = transfer.blocks(PlannedRead(extent, 0, last_two_of_each_row))
    assert torch.equal(block.rows(), expected[:, 1:])
    assert transfer.locate(extent).dtype.torch == dtype


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale": torch.tensor([float("nan")])}, "the scale of an fp8 tensor is not a number"),
        ({"scale": torch.ones(2)}, "an fp8 tensor with more than one scale"),
        ({"data": torch.zeros(3, 3, dtype=torch.uint8)}, "an fp8 tensor of shape"),
        ({"data": None}, "without rows of numbers"),
        ({"number": 10}, "is damaged"),
        ({"dtype": torch.float32}, "of torch.float32; expected: shape .* of bfloat16"),
    ],
)
def test_invalid_float8_tensors_are_refused(
    engine: types.SimpleNamespace, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    parts = {
        "data": elements(torch.float8_e4m3fn), "number": engine.dtype(7), "scale": torch.tensor([SCALE]),
        "dtype": torch.bfloat16, "shape": VALUES.shape, **change,
    }  # fmt: skip
    transfer, extent = stored(tmp_path, Pickled(engine.function, *parts.values()))
    with pytest.raises(CheckpointError, match=said) as refused:
        transfer.locate(extent)
    assert not isinstance(refused.value, UnsupportedCheckpointError)


def test_tensors_that_are_quantized_otherwise_are_no_damage(engine: types.SimpleNamespace, tmp_path: Path) -> None:
    transfer, extent = stored(tmp_path, Pickled(engine.other, elements(torch.float8_e4m3fn)))
    with pytest.raises(UnsupportedCheckpointError, match="_make_mxfp8_tensor_in_reduce_ex; expected: plain tensors"):
        transfer.locate(extent)
    transfer, extent = stored(tmp_path, {"a": 1})
    with pytest.raises(UnreadableCheckpointError, match="holds no tensor"):
        transfer.locate(extent)
