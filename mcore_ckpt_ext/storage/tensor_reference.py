"""Pickled tensors as references: what a pickle says about them, without their data."""

from __future__ import annotations

import torch

from mcore_ckpt_ext.errors import shown
from mcore_ckpt_ext.storage.budget import elements_of
from mcore_ckpt_ext.storage.inert import Stateless

# `torch.FloatStorage` and its siblings, by which torch.save names a storage's dtype (torch/serialization.py).
STORAGE_NAMES = {
    torch.float64: "DoubleStorage", torch.float32: "FloatStorage", torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage", torch.int64: "LongStorage", torch.int32: "IntStorage",
    torch.int16: "ShortStorage", torch.int8: "CharStorage", torch.uint8: "ByteStorage", torch.bool: "BoolStorage",
}  # fmt: skip


class StorageReference(Stateless):
    """What a pickled tensor says about its storage: the archive's record `key` holds `numel` elements of `dtype`."""

    def __init__(self, dtype: torch.dtype, key: str, numel: int) -> None:
        self.dtype, self.key, self.numel = dtype, key, numel


class TensorReference(Stateless):
    """A pickled tensor without its data: shape and strides in elements, `offset` elements into the storage."""

    def __init__(
        self, storage: StorageReference, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *more: object
    ) -> None:
        """Keep the description; `more` are the further arguments of `torch._utils._rebuild_tensor_v2`.

        Raises:
            TypeError, ValueError: there can be no such tensor, or marks give its elements another meaning.
        """
        marks = more[2] if len(more) > 2 else None  # `metadata` of that function
        if isinstance(marks, dict) and any(marks.values()):
            raise ValueError("a tensor marked as negated or conjugated: torch would compute its elements on reading")
        self.storage, self.offset, self.shape, self.stride = storage, offset, tuple(shape), tuple(stride)
        if not isinstance(storage, StorageReference):
            raise TypeError(f"a tensor without a storage: {shown(storage)}")
        try:
            elements_of(self.shape)
            if len(self.shape) != len(self.stride):
                raise ValueError("as many strides as axes are needed")
            for number in (offset, *self.stride):
                elements_of((number,))
        except ValueError as error:
            found = f"a tensor of shape {shown(self.shape)}, strides {shown(self.stride)}, from element {shown(offset)}"
            raise ValueError(f"{found}: {error}") from error

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


class StorageType(Stateless):
    """What a pickle names by one of `STORAGE_NAMES`: only the dtype matters."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
