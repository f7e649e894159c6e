"""Pairs the codes of quantized weights with their scales, in Hugging Face folders.

It decodes fp8 with a scale for each block of a matrix (DeepSeek-V3, `weight_scale_inv`), each row, or the whole matrix
(compressed-tensors, `weight_scale`), and the 4-bit floats of gpt-oss (`_blocks` and `_scales`). Sources:
transformers/integrations/finegrained_fp8.py and mxfp4.py (5.23); compressed_tensors/quantization (0.12).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError, shorten
from mcore_ckpt_ext.formats.hugging_face.folder import CONFIG, StoredTensor
from mcore_ckpt_ext.planning.array_location import ScaleCodec

_DTYPES = ("bfloat16", "float32", "float16")
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_CODES_IN_BYTE, _MX_BLOCK = 2, 32
# Scales of activations: inputs and outputs of layers, and the cache of attention.
_OF_ACTIVATIONS = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".q_scale", ".output_scale")


@dataclass(frozen=True)
class _Pairing:
    """Names of codes and scales, and the block size.

    `block`: the block size of a matrix with one scale for each block, if known.
    """

    codes: str
    scales: str
    block: tuple[int, int] | None = None
    packed: bool = False


def dequantised(
    stored: Mapping[str, StoredTensor], config: Mapping[str, Any], where: str
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors of a folder with decoded codes, and the names of the scales of activations.

    Args:
        stored: the stored tensors by name.
        config: `config.json`.
        where: the folder, for messages.

    Raises:
        UnsupportedCheckpointError: the kind of quantization is not supported.
        UnreadableCheckpointError: codes have no scales, or scales of another shape.
    """
    pairing = _pairing(config, where)
    if pairing is None:
        return dict(stored), []
    dtype = str(config.get("dtype") or config.get("torch_dtype") or _DTYPES[0])
    dtype = dtype if dtype in _DTYPES else _DTYPES[0]
    found: dict[str, StoredTensor] = {}
    scales = {
        name
        for name in stored
        if name.endswith(pairing.scales) and name.removesuffix(pairing.scales) + pairing.codes in stored
    }
    activations = sorted(name for name in stored if name.endswith(_OF_ACTIVATIONS))
    for name, tensor in stored.items():
        if name in scales or name in activations:
            continue
        scaled_by = (
            stored.get(name.removesuffix(pairing.codes) + pairing.scales) if name.endswith(pairing.codes) else None
        )
        if scaled_by is not None:
            whole = name.removesuffix("_blocks") if pairing.packed else name
            found[whole] = _decoded(name, tensor, scaled_by, pairing, dtype, where)
        elif tensor.extent.dtype in _FP8 or (pairing.packed and name.endswith(pairing.codes)):
            raise UnreadableCheckpointError("quantized weights have no scales", found=name, where=where)
        else:
            found[name] = tensor
    return found, activations


def _pairing(config: Mapping[str, Any], where: str) -> _Pairing | None:
    """Return how the weights are quantized; None if they are not."""
    quantised = config.get("quantization_config") or config.get("compression_config")
    if not quantised:
        return None
    settings = quantised if isinstance(quantised, Mapping) else {}
    method = settings.get("quant_method", quantised)
    if method == "fp8":
        block = settings.get("weight_block_size")
        if block is None or _is_block(block):
            return _Pairing(".weight", ".weight_scale_inv", tuple(block) if block else None)
        raise UnreadableCheckpointError(
            "the blocks of quantized weights have invalid sizes",
            found=f"weight_block_size {shorten(repr(block))}", expected="two whole numbers above 0",
            where=f"{where}/{CONFIG}", hint="the folder's config.json is damaged: download it again",
        )  # fmt: skip
    if method == "mxfp4":
        return _Pairing("_blocks", "_scales", (1, _MX_BLOCK), packed=True)
    if method == "compressed-tensors" and _is_fp8(settings):
        return _Pairing(".weight", ".weight_scale")
    raise UnsupportedCheckpointError(
        "the model is quantized, and its weights cannot be converted without changing them", found=method,
        expected="fp8 (by blocks, rows or tensors), or mxfp4", where=f"{where}/{CONFIG}",
        hint="use the model's bf16 release, or dequantize it first",
    )  # fmt: skip


def _is_block(block: Any) -> bool:
    sizes = block if isinstance(block, list) else []
    return len(sizes) == 2 and all(type(size) is int and 0 < size <= 1 << 20 for size in sizes)


def _is_fp8(settings: Mapping[str, Any]) -> bool:
    groups = settings.get("config_groups")
    weights = [
        group.get("weights") if isinstance(group, Mapping) else None
        for group in (groups.values() if isinstance(groups, Mapping) else ())
    ]
    return bool(weights) and all(
        isinstance(one, Mapping) and one.get("type") == "float" and one.get("num_bits") == 8
        and one.get("strategy") in ("tensor", "channel") and one.get("symmetric", True)
        for one in weights
    )  # fmt: skip


def _decoded(
    name: str, codes: StoredTensor, scales: StoredTensor, pairing: _Pairing, dtype: str, where: str
) -> StoredTensor:
    shape = codes.shape
    if pairing.packed:  # (..., rows, blocks in a row, bytes in a block); its scales are (..., rows, blocks in a row)
        shape = (*shape[:-2], prod(shape[-2:]) * _CODES_IN_BYTE)
    if isinstance(codes.extent, ScaleCodec) or isinstance(scales.extent, ScaleCodec):
        raise TypeError("these are numbers already")
    rows, columns = prod(shape[:-1]), shape[-1]
    for block in _blocks(pairing, shape):
        grid = (-(-rows // block[0]), -(-columns // block[1]))
        fits = prod(scales.shape) == prod(grid) and (pairing.block is None or scales.shape[-1:] == grid[1:])
        if fits and not codes.first and not scales.first:
            extent = ScaleCodec(codes.extent, scales.extent, rows, columns, block, dtype, pairing.packed)
            # transformers transposes what it unpacks (`convert_moe_packed_tensors`).
            return StoredTensor(
                (*shape[:-2], shape[-1], shape[-2]) if pairing.packed else shape, extent, 0, pairing.packed
            )
    raise UnreadableCheckpointError(
        "the scales of quantized weights do not match them", found=f"scales {scales.shape} for weights {codes.shape}",
        expected=f"one for each block of {pairing.block}" if pairing.block else "one for each row, or one for all",
        where=f"{where}: {name}", hint="the folder is damaged, or its config.json is of another model: "
            "download it again",
    )  # fmt: skip


def _blocks(pairing: _Pairing, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield possible block sizes of a matrix: the declared one; otherwise the whole matrix, then a row."""
    rows, columns = prod(shape[:-1]), shape[-1]
    if pairing.block is not None:
        if shape[-2] % pairing.block[0] == 0 or len(shape) == 2:  # otherwise blocks would cross into the next matrix
            yield pairing.block
        return
    yield rows, columns
    yield 1, columns
