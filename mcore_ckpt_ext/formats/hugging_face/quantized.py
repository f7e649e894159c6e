"""Pairs the codes of quantized weights with their scales, in Hugging Face folders.

It decodes fp8 with a scale for each block of a matrix (DeepSeek-V3, `weight_scale_inv`; compressed-tensors,
`weight_scale`), each row (FBGEMM), or the whole matrix (compressed-tensors, ModelOpt, and AutoFP8, `weight_scale`), the
4-bit floats of gpt-oss (`_blocks` and `_scales`), and those of ModelOpt (NVFP4: `weight_scale` for 16 elements of a
row, and `weight_scale_2` for the whole matrix). Sources: transformers/integrations/finegrained_fp8.py, fbgemm_fp8.py
and mxfp4.py (5.23); compressed_tensors/quantization (0.12; `_process_quantization` of lifecycle/forward.py);
modelopt/torch/export (0.47): `process_layer_quant_config` of quant_utils.py, unified_export_hf.py; auto_fp8/quantize.py
(AutoFP8, commit 505a7eda): `FP8StaticLinear`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.hugging_face.folder import CONFIG, StoredTensor
from mcore_ckpt_ext.formats.hugging_face.quantization import Pairing, pairing_of
from mcore_ckpt_ext.planning.array_location import PlainExtent, QuantizedMatrix

_DTYPES = ("bfloat16", "float32", "float16")
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_BYTE = "uint8"
_CODES_IN_BYTE = 2
_COMMON = "_2"
_NVFP4_BLOCK = 16
# Scales of activations: inputs and outputs of layers, and the cache of attention.
_OF_ACTIVATIONS = (".input_scale", ".k_scale", ".v_scale", ".q_scale", ".output_scale", "activation_scale")


def dequantize(
    stored: Mapping[str, StoredTensor], config: Mapping[str, Any], folder: Path
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors of a folder with decoded codes, and the names of the scales of activations.

    Args:
        stored: the stored tensors by name.
        config: `config.json`.
        folder: the folder, which may contain ModelOpt's own configuration.

    Raises:
        UnsupportedCheckpointError: the kind of quantization is not supported.
        UnreadableCheckpointError: codes have no scales, or scales of another shape.
    """
    where = str(folder)
    pairing = pairing_of(stored, config, folder)
    if pairing is None:
        check_numbers({name: tensor for name, tensor in stored.items() if tensor.extent.dtype in _FP8}, where)
        return dict(stored), []
    dtype = str(config.get("dtype") or config.get("torch_dtype") or _DTYPES[0])
    dtype = dtype if dtype in _DTYPES else _DTYPES[0]
    tensors: dict[str, StoredTensor] = {}
    scales = {
        name
        for name in stored
        if name.endswith(pairing.scales) and name.removesuffix(pairing.scales) + pairing.codes in stored
    }
    if pairing.in_pairs:
        scales |= {name + _COMMON for name in scales if name + _COMMON in stored}
    activations = sorted(name for name in stored if name.endswith(_OF_ACTIVATIONS))
    for name, tensor in stored.items():
        if name in scales or name in activations:
            continue
        scaled_by = (
            stored.get(name.removesuffix(pairing.codes) + pairing.scales) if name.endswith(pairing.codes) else None
        )
        if scaled_by is not None:
            whole = name.removesuffix("_blocks") if pairing.packed else name
            if whole != name and whole in stored:
                raise UnreadableCheckpointError(
                    "a weight is stored twice, quantized and as it is",
                    found=f"{name} and {whole}",
                    where=where,
                    hint="remove the one that is not of this model, or download the folder again",
                )
            common = stored.get(name.removesuffix(pairing.codes) + pairing.scales + _COMMON)
            if pairing.in_pairs and (common is not None or tensor.extent.dtype == _BYTE):
                tensors[whole] = _nvfp4(name, tensor, scaled_by, common, dtype, where)
            else:
                tensors[whole] = _decode(name, tensor, scaled_by, pairing, dtype, where)
        elif tensor.extent.dtype in (*_FP8, _BYTE) or (pairing.packed and name.endswith(pairing.codes)):
            raise UnreadableCheckpointError("quantized weights have no scales", found=name, where=where)
        else:
            tensors[name] = tensor
    return tensors, activations


def _nvfp4(
    name: str, codes: StoredTensor, scales: StoredTensor, common: StoredTensor | None, dtype: str, where: str
) -> StoredTensor:
    """Return a matrix of NVFP4: two codes in a byte, the first one in its lower half."""
    shape = (*codes.shape[:-1], codes.shape[-1] * _CODES_IN_BYTE)
    rows = prod(shape[:-1])
    columns = shape[-1]
    fits = scales.shape == (*shape[:-1], columns // _NVFP4_BLOCK) and columns % _NVFP4_BLOCK == 0
    are_codes = codes.extent.dtype == _BYTE and scales.extent.dtype in _FP8
    if common is not None and fits and prod(common.shape) == 1 and are_codes:
        arrays = [_whole_array(part) for part in (codes, scales, common)]
        block = (1, _NVFP4_BLOCK)
        extent = QuantizedMatrix(arrays[0], arrays[1], rows, columns, block, dtype, packed=True, common_scale=arrays[2])
        return StoredTensor(shape, extent)
    further = "no further scale" if common is None else f"a further scale {common.shape}"
    raise UnreadableCheckpointError(
        "the scales of NVFP4 weights do not match them",
        found=f"scales {scales.shape} in {scales.extent.dtype}, and {further}, "
        f"for codes {codes.shape} in {codes.extent.dtype}",
        expected=f"an fp8 scale for each {_NVFP4_BLOCK} elements of a row, and one for the whole matrix",
        where=f"{where}: {name}",
        hint="the folder is damaged, or of another quantization: download it again",
    )


def _whole_array(tensor: StoredTensor) -> PlainExtent:
    """Return the array of a tensor that fills it, and is not decoded yet."""
    if isinstance(tensor.extent, QuantizedMatrix) or tensor.first:
        raise UnsupportedCheckpointError(
            "quantized weights share their storage with other tensors",
            where=tensor.extent.file,
            hint="save the folder again as safetensors",
        )
    return tensor.extent


def check_numbers(weights: Mapping[str, StoredTensor], where: str) -> None:
    """Check that no weight consists of codes that `config.json` does not explain.

    Raises:
        UnsupportedCheckpointError: a weight has a dtype that no model is trained in.
    """
    codes = sorted(name for name, tensor in weights.items() if tensor.extent.dtype not in (*_DTYPES, "float64"))
    if codes:
        raise UnsupportedCheckpointError(
            "the weights are quantized, and config.json does not say how",
            found=f"{codes[0]} in {weights[codes[0]].extent.dtype}",
            expected="quantization_config",
            where=f"{where}/{CONFIG}",
            hint="use the model's bf16 release, or dequantize it first",
        )


def _decode(
    name: str, codes: StoredTensor, scales: StoredTensor, pairing: Pairing, dtype: str, where: str
) -> StoredTensor:
    shape = _swapped_shape(codes.shape) if codes.is_transposed else codes.shape
    if pairing.packed:  # (..., rows, blocks in a row, bytes in a block); its scales are (..., rows, blocks in a row)
        shape = (*shape[:-2], prod(shape[-2:]) * _CODES_IN_BYTE)
    if isinstance(codes.extent, QuantizedMatrix) or isinstance(scales.extent, QuantizedMatrix):
        raise TypeError("these are numbers already")
    if codes.extent.dtype not in ((_BYTE,) if pairing.packed else _FP8):
        raise UnreadableCheckpointError(
            "weights have scales, and are not quantized as config.json describes",
            found=f"{name} in {codes.extent.dtype}",
            expected=_BYTE if pairing.packed else " or ".join(_FP8),
            where=where,
            hint="download the folder again; or, if its weights are numbers already, remove the scales and "
            "quantization_config",
        )
    rows = prod(shape[:-1])
    columns = shape[-1]
    for block in _blocks(pairing, shape):
        grid = (-(-rows // block[0]), -(-columns // block[1]))
        fits = prod(scales.shape) == prod(grid) and (pairing.block is None or scales.shape[-1:] == grid[1:])
        are_scales = scales.extent.dtype in ((_BYTE,) if pairing.packed else (*_DTYPES, _BYTE))
        if fits and are_scales and not codes.first and not scales.first:
            extent = QuantizedMatrix(codes.extent, scales.extent, rows, columns, block, dtype, pairing.packed)
            # transformers transposes what it unpacks (`convert_moe_packed_tensors`).
            is_transposed = pairing.packed or codes.is_transposed
            return StoredTensor(_swapped_shape(shape) if is_transposed else shape, extent, 0, is_transposed)
    raise UnreadableCheckpointError(
        "the scales of quantized weights do not match them",
        found=f"scales {scales.shape} in {scales.extent.dtype} for weights {codes.shape}",
        expected=f"one for each block of {pairing.block}"
        if pairing.block
        else "one for each row or matrix, or one for all",
        where=f"{where}: {name}",
        hint="the folder is damaged, or its config.json is of another model: download it again",
    )


def _swapped_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a stack of matrices after transposing each."""
    return (*shape[:-2], shape[-1], shape[-2])


def _blocks(pairing: Pairing, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield possible block sizes: the declared one; else a whole tensor, a matrix of a stack, a row."""
    rows = prod(shape[:-1])
    columns = shape[-1]
    if pairing.block is not None:
        if shape[-2] % pairing.block[0] == 0 or len(shape) == 2:  # otherwise blocks would cross into the next matrix
            yield pairing.block
        return
    yield rows, columns
    if len(shape) > 2:
        yield shape[-2], columns
    yield 1, columns
