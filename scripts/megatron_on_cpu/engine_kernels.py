"""Replaces the compiled extension of Transformer Engine, so that its Python code runs without kernels.

Modules, parameters, recipes, quantized tensors and FusedAdam run unchanged. Functions for constructors and the
optimizer are implemented here with torch; any other name can be imported and raises an error when it is called. So no
forward pass runs, and training needs ``synthetic_training``.

Read in Transformer Engine 2.20.2: transformer_engine/common/__init__.py, common/multi_tensor/adam.cu,
and under transformer_engine/pytorch csrc/extensions/pybind.cpp, optimizers/fused_adam.py, module/base.py and
tensor/float8_tensor.py.  It runs with 2.13.0 and 2.16.0, too.
"""

from __future__ import annotations

import enum
import functools
import importlib
import os
import sys
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_on_cpu.precision_aware import join, split

FOLDER_VARIABLE = "MEGATRON_ON_CPU_TRANSFORMER_ENGINE"
"""Environment variable: the folder with Transformer Engine's Python part, for jobs that have it."""

_EXTENSION = "transformer_engine_torch"
_HAVE_KERNELS = ("transformer_engine", "apex")
# This module needs a library for ONNX files and is not used in training.
_ONNX = "transformer_engine.pytorch.onnx_extensions"


DType = enum.IntEnum(
    "DType",
    {
        "kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7, "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
)  # fmt: skip
_FLOAT8 = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}
_PLACES = ("INPUT", "WEIGHT", "OUTPUT")
FP8FwdTensors = enum.IntEnum(
    "FP8FwdTensors", [f"GEMM{number}_{place}" for number in (1, 2, 3) for place in _PLACES], start=0
)
FP8BwdTensors = enum.IntEnum(
    "FP8BwdTensors", [f"GRAD_{place}{number}" for number in (1, 2, 3) for place in ("OUTPUT", "INPUT")], start=0
)
NVTE_Fused_Attn_Backend = enum.IntEnum(
    "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
)
# A member of the enum in 2.13; later releases require that it is not.
NVTE_Fused_Attn_Backend.NVTE_F16_max512_seqlen = 0


class FP8TensorMeta:
    """Scales and histories of a module's tensors; the module sets them."""

    scale: torch.Tensor | None = None
    amax_history: torch.Tensor | None = None


class _Numbered(type):
    """An object whose attributes are distinct numbers, like members of an enum."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, sum(isinstance(value, int) for value in vars(cls).values()))
        return int(getattr(cls, name))


def _missing(name: str) -> Any:
    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"{name}: a kernel of Transformer Engine, which the stand-in for its extension does not have"
        )

    return _Numbered(name, (), {"__init__": refuse})


class _Extension(types.ModuleType):
    """A module from which every name can be imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _missing(name))
        return vars(self)[name]


@torch.no_grad()
def multi_tensor_adam(chunk: int, no_op: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], *options: Any) -> None:
    """Run Adam over lists of gradients, parameters, first and second moments, and separate masters if any."""
    for gradient, parameter, *moments_and_master in zip(*lists, strict=True):
        first, second, *masters = moments_and_master
        master = masters[0] if masters else parameter
        _advance(master, gradient, first, second, *options)
        if masters:
            parameter.copy_(master)


@torch.no_grad()
def multi_tensor_adam_param_remainder(
    chunk: int, no_op: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], *options: Any
) -> None:
    """Run Adam with masters that consist of a bf16 parameter and an int16 remainder."""
    for gradient, parameter, first, second, remainder in zip(*lists, strict=True):
        master = join(parameter.reshape(-1), remainder.reshape(-1)).reshape(parameter.shape)
        _advance(master, gradient, first, second, *options)
        rounded, rest = split(master.reshape(-1))
        parameter.copy_(rounded.reshape(parameter.shape))
        remainder.copy_(rest.reshape(parameter.shape))


def _advance(
    master: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor,
    rate: float, beta1: float, beta2: float, epsilon: float, step: int, decoupled: int, corrected: int, decay: float,
) -> None:  # fmt: skip
    gradient, first_now, second_now = gradient.float(), first.float(), second.float()
    if not decoupled:
        gradient = gradient + decay * master
    first_now = first_now.mul(beta1).add(gradient, alpha=1 - beta1)
    second_now = second_now.mul(beta2).addcmul(gradient, gradient, value=1 - beta2)
    first.copy_(first_now)
    second.copy_(second_now)
    corrections = (1 - beta1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
    update = (first_now / corrections[0]) / ((second_now / corrections[1]).sqrt() + epsilon)
    if decoupled:
        update = update + decay * master
    master.add_(update, alpha=-rate)


def multi_tensor_l2norm(
    chunk: int, no_op: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], of_each: bool = False, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors together."""
    squares = [values.float().square().sum() for values in lists[0]]
    norm = torch.stack(squares).sum().sqrt().reshape(1) if squares else torch.zeros(1)
    return norm, norm


def multi_tensor_scale(chunk: int, no_op: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], scale: float) -> None:
    """Copy tensors, multiplied by a scale."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def quantize(values: torch.Tensor, quantizer: Any, output: Any = None, no_op: torch.Tensor | None = None) -> Any:
    """Quantize to fp8 with the quantizer's scale, or by the largest value for current scaling."""
    tensors: Any = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    blocks: Any = importlib.import_module("transformer_engine.pytorch.tensor.float8_blockwise_tensor")
    if isinstance(quantizer, blocks.Float8BlockQuantizer):
        return _quantize_blocks(values, quantizer, output)
    dtype = _FLOAT8[int(quantizer.dtype)]
    largest, found = torch.finfo(dtype).max, values.detach().float()
    amax = found.abs().max().reshape(1) if found.numel() else found.new_zeros(1)
    if isinstance(quantizer, tensors.Float8Quantizer):
        scale = quantizer.scale.reshape(1)
        if quantizer.amax.numel():
            quantizer.amax.copy_(amax.reshape(quantizer.amax.shape))
    elif isinstance(quantizer, tensors.Float8CurrentScalingQuantizer):
        scale = torch.where(amax > 0, largest / amax, torch.ones_like(amax))
    else:
        raise RuntimeError(f"quantizing with {type(quantizer).__name__} is not in the stand-in")
    data = (found * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)
    if output is not None:
        output._data.copy_(data.reshape(output._data.shape))
        output._scale_inv.copy_((1 / scale).reshape(output._scale_inv.shape))
        return output
    return tensors.Float8Tensor(
        shape=values.shape, dtype=values.dtype, data=data, fp8_scale_inv=1 / scale, fp8_dtype=quantizer.dtype,
        requires_grad=False, data_transpose=None, quantizer=quantizer, device=data.device,
    )  # fmt: skip


def _quantize_blocks(values: torch.Tensor, quantizer: Any, output: Any) -> Any:
    """Quantize to fp8 with a scale for each square block, and the transposed copy of both."""
    dtype, length, (rows, columns) = _FLOAT8[int(quantizer.dtype)], quantizer.block_len, values.shape
    largest, (down, across) = torch.finfo(dtype).max, (-(-rows // length), -(-columns // length))
    padding = (0, across * length - columns, 0, down * length - rows)
    blocks = torch.nn.functional.pad(values.detach().float(), padding).view(down, length, across, length)
    amax = blocks.abs().amax(dim=(1, 3))
    scales = torch.where(amax > 0, largest / amax, torch.ones_like(amax))
    if quantizer.force_pow_2_scales:
        scales = torch.exp2(torch.floor(torch.log2(scales)))
    data = (blocks * scales[:, None, :, None]).clamp(-largest, largest).to(dtype).view(torch.uint8)
    data = data.reshape(down * length, across * length)[:rows, :columns]
    parts: dict[str, Any] = {}
    for name, codes, inverse in (("row", data, 1 / scales), ("column", data.t(), (1 / scales).t())):
        padded = inverse.new_zeros(inverse.shape[0], -(-inverse.shape[1] // 4) * 4)
        padded[:, : inverse.shape[1]] = inverse
        parts |= {f"{name}wise_data": codes.contiguous(), f"{name}wise_scale_inv": padded}
    if output is not None:
        for name, part in parts.items():
            if getattr(output, f"_{name}") is not None:
                getattr(output, f"_{name}").copy_(part)
        return output
    tensors: Any = importlib.import_module("transformer_engine.pytorch.tensor.float8_blockwise_tensor")
    return tensors.Float8BlockwiseQTensor(
        shape=values.shape, dtype=values.dtype, fp8_dtype=quantizer.dtype, quantizer=quantizer, is_2D_scaled=True,
        requires_grad=False, device=data.device, **parts,
    )  # fmt: skip


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pinned: bool
) -> Any:
    """Return an fp8 tensor whose elements are written later."""
    return quantize(torch.zeros(tuple(shape), dtype=dtype, device=device), quantizer)


def dequantize(values: Any, dtype: Any) -> torch.Tensor:
    """Return the numbers for fp8 bytes and their scale."""
    numbers = values._data.view(_FLOAT8[int(values._fp8_dtype)]).float() * values._scale_inv
    return numbers.to({4: torch.float32, 5: torch.float16, 6: torch.bfloat16}[int(dtype)])


def compute_amax(values: torch.Tensor, amax: torch.Tensor) -> None:
    """Compute the largest absolute value."""
    amax.copy_(values.abs().max().reshape(amax.shape))


def multi_tensor_compute_scale_and_scale_inv(
    chunk: int, no_op: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], largest: float, powers: bool, least: float
) -> None:
    """Compute scales for largest values, and their inverses."""
    for amax, scale, inverse in zip(*lists, strict=True):
        scale.copy_(torch.where(amax > 0, largest / amax.clamp(min=least), torch.ones_like(amax)))
        inverse.copy_(1 / scale)


def fp8_transpose(data: torch.Tensor, dtype: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """Transpose a matrix of fp8 bytes."""
    turned = data.reshape(-1, data.shape[-1]).t().contiguous()
    return turned if out is None else out.copy_(turned.reshape(out.shape))


_GIVEN = (
    DType, FP8FwdTensors, FP8BwdTensors, NVTE_Fused_Attn_Backend, FP8TensorMeta, multi_tensor_adam,
    multi_tensor_adam_param_remainder, multi_tensor_l2norm, multi_tensor_scale, quantize,
    create_empty_quantized_tensor, dequantize, compute_amax, multi_tensor_compute_scale_and_scale_inv, fp8_transpose,
)  # fmt: skip
_VERSIONS = {
    "get_cudnn_version": 91400, "get_cublasLt_version": 130000, "get_num_cublas_streams": 4,
    "get_stream_priority_range": (0, 0), "ubuf_built_with_mpi": False,
}  # fmt: skip


def install() -> None:
    """Make Transformer Engine importable, if this job has it; before the first import of Megatron.

    A job without it does not import one that is installed, nor Apex: their kernels would refuse the CPU's tensors.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        sys.modules.update(dict.fromkeys(_HAVE_KERNELS))  # not found: importing None fails
        return
    sys.path.insert(0, str(Path(folder)))
    # The package then neither searches a shared library nor checks how it was installed.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    extension, onnx = _Extension(_EXTENSION), _Extension(_ONNX)
    _fill(extension, _GIVEN)
    for name, value in _VERSIONS.items():
        setattr(extension, name, lambda *_, found=value: found)
    sys.modules[_EXTENSION], sys.modules[_ONNX] = extension, onnx
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda _: None
    importlib.import_module("transformer_engine.pytorch")
    # It checks for a GPU with the recipe's kernels, which are never called.
    recipes: Any = importlib.import_module("transformer_engine.pytorch.quantization")
    recipes.check_mxfp8_support = lambda: (True, "")
    _put_on_the_cpu(importlib.import_module("transformer_engine.pytorch.quantized_tensor").QuantizedTensor)


def _put_on_the_cpu(kind: Any) -> None:
    """Create tensors on the CPU; up to 2.13, tensors derived from others are on the current GPU."""
    make = kind.__new__

    @functools.wraps(make)
    def new(cls: type, *positional: Any, device: Any = None, **keywords: Any) -> Any:
        return make(cls, *positional, device=torch.device("cpu") if device is None else device, **keywords)

    kind.__new__ = staticmethod(new)


def _fill(module: types.ModuleType, given: Iterable[Any]) -> None:
    for item in given:
        setattr(module, item.__name__, item)
