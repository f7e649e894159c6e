"""How the weights of a Hugging Face folder are quantized, by its configuration.

Sources: transformers/integrations/finegrained_fp8.py, fbgemm_fp8.py and mxfp4.py (5.23); compressed_tensors/
quantization (0.12); modelopt/torch/export (0.47): `process_layer_quant_config` of quant_utils.py, unified_export_hf.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError, shorten
from mcore_ckpt_ext.formats.hugging_face.folder import CONFIG
from mcore_ckpt_ext.storage.json_text import read_json

_MX_BLOCK = 32
_MODEL_OPT = "hf_quant_config.json"
# ModelOpt's algorithms whose weights are codes and scales alone, and the one that names an algorithm for each layer.
_READ = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4")
_MIXED = "MIXED_PRECISION"
_OF_CACHE = "kv_cache_quant_algo"
# Sections of compressed-tensors whose matrices are multiplied by others in the forward pass, or stored without zeros
# (`TransformConfig`, `SparsityCompressionConfig`, commit ac8e2ba8).
_OTHER_SECTIONS = ("transform_config", "sparsity_config")


@dataclass(frozen=True)
class Pairing:
    """Ends of the names of codes and scales, and the block size.

    `block`: the block size of a matrix with one scale for each block, if known.
    `packed`: codes are 4-bit floats, in a further axis for the blocks of a row.
    `in_pairs`: codes in bytes are 4-bit floats, and have a further scale of the whole matrix.
    """

    codes: str
    scales: str
    block: tuple[int, int] | None = None
    packed: bool = False
    in_pairs: bool = False


def pairing_of(stored: Collection[str], config: Mapping[str, Any], folder: Path) -> Pairing | None:
    """Return how the weights with these names are quantized; None if they are not."""
    quantized = quantization_of(config, folder)
    where = str(folder)
    if not quantized:
        return None
    settings = quantized if isinstance(quantized, Mapping) else {}
    method = settings.get("quant_method", "without quant_method")
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):  # the first releases named no method
        method = "bitsandbytes"
    if method == "fp8":
        block = _block("weight_block_size", settings, where)
        is_inverse = block is not None or any(name.endswith("_scale_inv") for name in stored)
        return Pairing("", "_scale_inv" if is_inverse else "_scale", block)
    if method == "fbgemm_fp8":
        return Pairing("", "_scale")
    if method == "mxfp4":
        return Pairing("_blocks", "_scales", (1, _MX_BLOCK), packed=True)
    if method == "compressed-tensors" and (schemes := _fp8_schemes(settings)) is not None:
        return Pairing("", "_scale", _block("block_structure", schemes[0], where) if schemes else None)
    if method == "modelopt":
        _check_model_opt(settings, folder)
        return Pairing("", "_scale", in_pairs=True)
    kind = next(_other_sections(settings), settings.get("format"))
    raise UnsupportedCheckpointError(
        "the model is quantized, and its weights cannot be converted without changing them",
        found=f"{shorten(str(method))} ({shorten(kind)})" if isinstance(kind, str) else shorten(str(method)),
        expected="fp8 (by blocks, rows or tensors), nvfp4, or mxfp4",
        where=f"{where}/{CONFIG}",
        hint="use the model's bf16 release, or dequantize it first",
    )


def quantization_of(config: Mapping[str, Any], folder: Path) -> Any:
    """Return the section of `config.json` about quantization, or else ModelOpt's own file, if any.

    Args:
        config: `config.json`.
        folder: the folder of the model.

    Raises:
        UnreadableCheckpointError: ModelOpt's file is damaged.
    """
    if section := config.get("quantization_config") or config.get("compression_config"):
        return section
    return {"quant_method": "modelopt"} if (folder / _MODEL_OPT).is_file() else None


def _check_model_opt(settings: Mapping[str, Any], folder: Path) -> None:
    """Check that ModelOpt's codes and scales are all of the weights.

    AWQ and SVD also scale activations, or add matrices.

    Raises:
        UnsupportedCheckpointError: an algorithm is not supported.
    """
    where = folder / CONFIG
    if "quant_algo" not in settings:
        where = folder / _MODEL_OPT
        inside = read_json(where).get("quantization") if where.is_file() else None
        settings = inside if isinstance(inside, Mapping) else {}
    algorithms = [settings.get("quant_algo")]
    if algorithms == [None] and settings.get(_OF_CACHE):  # nothing else is quantized, and that only when it serves
        algorithms = []
    if algorithms == [_MIXED]:
        layers = settings.get("quantized_layers")
        of_layers = layers.values() if isinstance(layers, Mapping) else [None]
        algorithms = [layer.get("quant_algo") if isinstance(layer, Mapping) else None for layer in of_layers]
    if other := sorted({str(name) for name in algorithms if name not in _READ}):
        raise UnsupportedCheckpointError(
            "ModelOpt quantized the model in a way whose weights cannot be converted",
            found=", ".join(other),
            expected=", ".join(_READ),
            where=str(where),
            hint="use the model's bf16 release, or dequantize it first",
        )


def _block(key: str, settings: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Return the size of the blocks that have a scale each; None if there are none."""
    block = settings.get(key)
    if block is None:
        return None
    sizes = block if isinstance(block, list) else []
    if len(sizes) == 2 and all(type(size) is int and 0 < size <= 1 << 20 for size in sizes):
        return sizes[0], sizes[1]
    raise UnreadableCheckpointError(
        "the blocks of quantized weights have invalid sizes",
        found=f"{key} {shorten(repr(block))}",
        expected="two whole numbers above 0",
        where=f"{where}/{CONFIG}",
        hint="the folder's config.json is damaged: download it again",
    )


def _fp8_schemes(settings: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Return the schemes of weights, none if only activations are quantized.

    Returns:
        None if a scheme is not fp8, if their blocks differ in size, or if codes and scales are not all of the weights.
    """
    groups = settings.get("config_groups")
    every = [*groups.values()] if isinstance(groups, Mapping) else [None]
    weights: list[Any] = [group.get("weights") if isinstance(group, Mapping) else {} for group in every]
    schemes = [scheme if isinstance(scheme, Mapping) else {} for scheme in weights if scheme is not None]
    are_fp8 = not any(_other_sections(settings)) and all(
        scheme.get("type") == "float"
        and scheme.get("num_bits") == 8
        and scheme.get("strategy") in ("tensor", "channel", "block")
        and (scheme["strategy"] == "block") is (scheme.get("block_structure") is not None)
        and scheme.get("block_structure") == schemes[0].get("block_structure")
        and scheme.get("symmetric", True)
        for scheme in schemes
    )
    return schemes if are_fp8 else None


def _other_sections(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of compressed-tensors that make the weights differ from their codes and scales."""
    for key in _OTHER_SECTIONS:
        section = settings.get(key)
        is_empty = isinstance(section, Mapping) and (
            section.get("config_groups") == {} or section.get("format") == "dense"
        )
        if section and not is_empty:
            yield key
