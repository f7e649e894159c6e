"""Test the stand-ins for the classes of torch's checkpoint metadata."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext.storage.dcp_index import read_index
from mcore_ckpt_ext.storage.pickle_stubs import TensorProperties, metadata_class

DATA = Path(__file__).parents[1] / "data"


def test_an_index_of_torch_2_15_has_strides(tmp_path: Path) -> None:
    shutil.copy(DATA / "torch_2_15.metadata", tmp_path / ".metadata")
    found = {name: array.shape for name, array in read_index(tmp_path).arrays.items()}
    assert found == {
        "axes1": (24,), "axes2": (4, 6), "axes3": (2, 3, 4), "axes4": (1, 2, 3, 4), "axes6": (1, 1, 1, 2, 3, 4),
        "none": (),
    }  # fmt: skip


@pytest.mark.parametrize("strides", [None, (), (3, 1), (2**40, 1)])
def test_strides_are_numbers(strides: tuple[int, ...] | None) -> None:
    properties = TensorProperties()
    properties.__setstate__((torch.bfloat16, torch.strided, False, None, False, strides))
    assert properties.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "state",
    [
        (torch.float32, torch.strided, False, None, False, (1, (2, 3))),
        (torch.float32, torch.strided, False, None, False, (1.5,)),
        (torch.float32, torch.strided, False, None, False, (1,) * 65),
        (torch.float32, torch.strided, False, None, False, 7),
        (torch.float32, (3, 1), False, None, False, None),
        (torch.float32, torch.strided, False, None, False, (1,), (1,)),
    ],
)
def test_nothing_else_is_a_property(state: tuple[object, ...]) -> None:
    with pytest.raises(TypeError, match="of a tensor (are not all integers|have an invalid type)"):
        TensorProperties().__setstate__(state)


def test_a_record_is_shown_without_its_attributes() -> None:
    """They may refer to the record itself."""
    record = metadata_class("Metadata")()
    record.__setstate__({"itself": record})
    assert repr(record) == "<Metadata>"
