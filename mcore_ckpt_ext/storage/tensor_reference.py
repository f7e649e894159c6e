"""References to pickled tensors: their description without their data."""

from __future__ import annotations

from mcore_ckpt_ext.errors import format_value
from mcore_ckpt_ext.storage.budget import checked_numel
from mcore_ckpt_ext.storage.dtypes import Dtype, dtype_named
from mcore_ckpt_ext.storage.pickle_stubs import Placeholder, Stateless, origin_of

# Classes such as `torch.FloatStorage`, with which torch.save names the dtype of a storage (torch/serialization.py).
STORAGE_NAMES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}


class StorageReference(Stateless):
    """A reference to a storage: record `key` of the archive holds `numel` elements of `dtype`."""

    def __init__(self, dtype: Dtype, key: str, numel: int) -> None:
        self.dtype = dtype
        self.key = key
        self.numel = numel


class TensorReference(Stateless):
    """A pickled tensor without its data: shape, strides in elements, `offset` elements into the storage."""

    def __init__(
        self, storage: StorageReference, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *more: object
    ) -> None:
        """Keep the description; `more` are the further arguments of `torch._utils._rebuild_tensor_v2`.

        Raises:
            TypeError, ValueError: no tensor can be like this, or it is marked as negated or conjugated.
        """
        marks = more[2] if len(more) > 2 else None  # `metadata` of that function
        if isinstance(marks, dict) and any(marks.values()):
            raise ValueError("a tensor marked as negated or conjugated: torch would compute its elements on reading")
        self.storage = storage
        self.offset = offset
        self.shape = tuple(shape)
        self.stride = tuple(stride)
        if not isinstance(storage, StorageReference):
            raise TypeError(f"a tensor without a storage: {format_value(storage)}")
        try:
            checked_numel(self.shape)
            if len(self.shape) != len(self.stride):
                raise ValueError("as many strides as axes are needed")
            for number in (offset, *self.stride):
                checked_numel((number,))
        except ValueError as error:
            strides = format_value(self.stride)
            first = format_value(offset)
            description = f"a tensor of shape {format_value(self.shape)}, strides {strides}, from element {first}"
            raise ValueError(f"{description}: {error}") from error

    @property
    def is_contiguous(self) -> bool:
        """True if the elements lie in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


class StorageType(Stateless):
    """A storage class of `STORAGE_NAMES` in a pickle; only its dtype matters."""

    def __init__(self, dtype: Dtype) -> None:
        self.dtype = dtype


# transformer_engine/common/include/transformer_engine/transformer_engine.h, `NVTEDType`, 1.0 to 2.20.2.
_FLOAT8 = {
    7: dtype_named("float8_e4m3fn"),
    8: dtype_named("float8_e5m2"),
    "kFloat8E4M3": dtype_named("float8_e4m3fn"),
    "kFloat8E5M2": dtype_named("float8_e5m2"),
}


class Float8Reference(Stateless):
    """A pickled Float8Tensor of Transformer Engine without its data: fp8 elements with one scale.

    Source: `Float8Tensor.__reduce_ex__`, transformer_engine/pytorch/tensor/float8_tensor.py, 2.13.0, 2.16.0, 2.20.2.
    """

    def __init__(
        self, data: object, fp8_dtype: object, scale: object, dtype: object, shape: object, transpose: object = None
    ) -> None:
        """Keep the description.

        Args:
            data: the fp8 elements as bytes.
            fp8_dtype: Transformer Engine's enum member for their dtype.
            scale: the factor of all elements (`_scale_inv` in Transformer Engine).
            dtype: the dtype that the tensor presents.
            shape: shape of the tensor.
            transpose: the transposed elements, if only these are stored.

        Raises:
            TypeError, ValueError: no tensor can be like this.
        """
        if not isinstance(data, TensorReference) or not isinstance(scale, TensorReference) or transpose is not None:
            raise TypeError("an fp8 tensor without rows of numbers, or without a scale")
        if tuple(shape) != data.shape or data.storage.dtype.name != "uint8":  # type: ignore[arg-type]
            raise ValueError(
                f"an fp8 tensor of shape {format_value(shape)} on bytes of shape {format_value(data.shape)}"
            )
        if scale.storage.dtype.name != "float32" or checked_numel(scale.shape) != 1 or not isinstance(dtype, Dtype):
            raise ValueError("an fp8 tensor with more than one scale, or of no dtype")
        self.data = data
        self.scale = scale
        self.dtype = dtype
        self.fp8_dtype = _FLOAT8[_enum_value(fp8_dtype)]


def _enum_value(dtype: object) -> object:
    """Return the number or the name of a member of Transformer Engine's dtype enum.

    In 2.20 it is an `IntEnum`, pickled as a call with its number; before, an enum of pybind11, pickled with its number
    or name as state.
    """
    if isinstance(dtype, Placeholder):
        values = (*dtype.arguments, *origin_of(dtype).state)
        return values[0] if values else None
    return dtype
