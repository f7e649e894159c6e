"""Checks the files of a transformers folder against its index and `config.json`, for any model.

Sources: `_get_resolved_checkpoint_files`, `load_state_dict` (modeling_utils.py, transformers 4.41 to 5.23); `Metadata`
(safetensors/src/tensor.rs, 0.3 to 0.8).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import (
    ContentError,
    UnreadableCheckpointError,
    UnsupportedCheckpointError,
    join_some,
    quantity,
    shorten,
)
from mcore_ckpt_ext.families.text_parts import text_names, text_section
from mcore_ckpt_ext.families.vision_shapes import strip_prefix, vision_shapes
from mcore_ckpt_ext.formats.hugging_face.folder import (
    CONFIG,
    INDICES,
    WEIGHT_FILES,
    StoredTensor,
    tensors_of,
    weight_files_of,
)
from mcore_ckpt_ext.formats.hugging_face.quantization import quantization_of
from mcore_ckpt_ext.formats.hugging_face.quantized import dequantize
from mcore_ckpt_ext.formats.listing import ListedTensor, Listing
from mcore_ckpt_ext.planning.array_location import QuantizedMatrix
from mcore_ckpt_ext.storage.json_text import read_json
from mcore_ckpt_ext.storage.listed_files import is_file_name
from mcore_ckpt_ext.storage.remote import folder_reader
from mcore_ckpt_ext.storage.safetensors import METADATA, SUFFIX, read_header

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_FORMATS = ("pt", "tf", "flax", "mlx")
# Suffixes that quantizers give their scales: DeepSeek's fp8, compressed-tensors, mxfp4, GPTQ, AWQ.
_SCALES = ("_scale_inv", "_scale", "_scale_2", "_scales", ".scales")
# Quantizers that store codes under the first names, or as bytes, and scales in the same module whose names contain the
# second ones: `WQLinear_GEMM` (awq/modules/linear/gemm.py, commit 88e4c76b), `GPTQQuantLinear`
# (gptqmodel/nn_modules/qlinear, f4c327a1), compressed_tensors/compressors (ac8e2ba8), `Linear8bitLt` and `QuantState`
# (bitsandbytes, 95f9af30).
_WITH_SCALES = ("awq", "gptq", "compressed-tensors", "bitsandbytes")
_CODES = ("qweight", "weight_packed")
_OF_CODES = ("scale", "SCB", "absmax")
_SHOWN = 4


def list_model(folder: Path, below: str = "") -> Listing:
    """List the tensors of a folder, and the problems of its files.

    Args:
        folder: the checkpoint's folder.
        below: the subfolder with the weights.
    """
    listing = Listing(folder, folder_reader(folder))
    config = _read_object(listing, _below(below, CONFIG))
    names = [name for name in WEIGHT_FILES if (folder / below / name).exists()]
    if not names:
        listing.add("files", below, f"no weights: there is no {' and no '.join(WEIGHT_FILES)}")
        return listing
    first, *others = names
    if first in INDICES:
        stored = _list_index(listing, below, first)
    else:
        stored = dict(list_file(listing, _below(below, first)))
        listing.files = 1
    read = {Path(tensor.extent.file).name for tensor in stored.values()} | {first}
    for name in sorted(({*others} | weight_files_of(folder / below)) - read):
        if not any(problem.file == _below(below, name) for problem in listing.problems):
            listing.add("files", _below(below, name), f"not used: {first} takes precedence", is_error=False)
    settings = config or {}
    is_quantized = bool(quantization_of(settings, folder / below))
    for name, tensor in stored.items():
        if not isinstance(tensor.extent, QuantizedMatrix):
            is_scale = is_quantized and name.endswith(_SCALES)
            listing.tensors.append(ListedTensor(name, tensor.shape, tensor.extent, tensor.first, is_scale))
    if config is not None and listing.is_readable:
        _check_vision(listing, stored, {} if is_quantized else config, below)
        _check_scales(listing, stored, config, below)
        _check_dtypes(listing, config, is_quantized)
    return listing


def list_file(listing: Listing, file: str) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of one file; add a problem to the listing if the file cannot be read."""
    try:
        tensors = list(tensors_of(listing.reader, file))
        if file.endswith(SUFFIX):
            _check_metadata(listing, file, read_header(listing.reader, file).get(METADATA))
        else:
            listing.archives.append(file)
    except ContentError as problem:
        listing.add_refusal(file, problem)
        return
    yield from tensors


def _read_object(listing: Listing, file: str) -> dict[str, Any] | None:
    try:
        return read_json(listing.folder / file)
    except UnreadableCheckpointError as problem:
        listing.add_refusal(file, problem)
        return None


def _check_metadata(listing: Listing, file: str, metadata: object) -> None:
    """Check a file's metadata in its header."""
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        listing.add("files", file, f"{METADATA} has values that are not text, which safetensors refuses", offset=8)
    elif metadata.get("format") not in _FORMATS:
        message = f"{METADATA} names no format: transformers 4 loads only {', '.join(_FORMATS)}"
        listing.add("files", file, message, offset=8, is_error=False)


def _list_index(listing: Listing, below: str, index: str) -> dict[str, StoredTensor]:
    content = _read_object(listing, _below(below, index))
    if content is None:
        return {}
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        listing.add("files", _below(below, index), "it has no weight_map")
        return {}
    by_file: defaultdict[str, list[str]] = defaultdict(list)
    for name, file in weight_map.items():
        by_file[file].append(name)
    listing.files = len(by_file)
    tensors: dict[str, StoredTensor] = {}
    for file, names in sorted(by_file.items()):
        for name, tensor in _list_shard(listing, below, index, file, names):
            if name in tensors:
                message = (
                    f"{name} is also in {Path(tensors[name].extent.file).name}: files of different models are mixed"
                )
                listing.add("tensors", _below(below, file), message)
            tensors[name] = tensor
    return tensors


def _list_shard(
    listing: Listing, below: str, index: str, file: str, names: list[str]
) -> Iterator[tuple[str, StoredTensor]]:
    place = _below(below, file)
    if not is_file_name(file):
        listing.add("files", _below(below, index), f"it names no file of its folder: {shorten(repr(file))}")
        return
    if not (listing.folder / place).exists():
        listing.add(
            "files", place, f"missing; {index} lists {quantity(len(names), 'tensor')} in it: {join_some(names, _SHOWN)}"
        )
        return
    held = dict(list_file(listing, place))
    if place not in listing.unread:
        if absent := [name for name in names if name not in held]:
            listing.add("tensors", place, f"{index} lists tensors that it does not hold: {join_some(absent, _SHOWN)}")
        if surplus := sorted(held.keys() - set(names)):
            listing.add(
                "tensors", place, f"it holds tensors that {index} does not list there: {join_some(surplus, _SHOWN)}"
            )
    yield from held.items()


def _check_vision(listing: Listing, stored: Mapping[str, StoredTensor], config: Mapping[str, Any], below: str) -> None:
    """Check the names and shapes of a vision part, whatever the model of the text is."""
    expected = vision_shapes(config)
    if expected is None:
        return
    named = {strip_prefix(name): name for name, text in text_names(stored).items() if text is None}
    if missing := [name for name in expected if name not in named]:
        message = f"the vision part that {CONFIG} describes lacks tensors: {join_some(missing, _SHOWN)}"
        listing.add("tensors", below, message)
    for name, shape in expected.items():
        tensor = stored.get(named.get(name, ""))
        if tensor is not None and tensor.shape != shape:
            message = f"{named[name]} has the shape {tensor.shape}, not {shape}, which {CONFIG} describes"
            listing.add("tensors", tensor.extent.file, message)
    listing.described |= {named[name] for name in expected if name in named}


def _check_scales(listing: Listing, stored: Mapping[str, StoredTensor], config: Mapping[str, Any], below: str) -> None:
    """Check that quantized weights have scales of matching shape, if their quantization is supported."""
    try:
        dequantize(stored, config, listing.folder / below)
    except UnsupportedCheckpointError:
        listing.has_signed_scales = True
        settings = quantization_of(config, listing.folder / below)
        if isinstance(settings, Mapping) and settings.get("quant_method") in _WITH_SCALES:
            for name, tensor in _codes_without_scales(stored):
                listing.add("scales", tensor.extent.file, f"{name} has no scales")
    except UnreadableCheckpointError as problem:
        listing.add("scales", below, str(problem))


def _codes_without_scales(stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the codes of modules of which no tensor is named as scales are."""
    parts = [name.rpartition(".") for name in stored]
    scaled = {module.removesuffix(".weight") for module, _, leaf in parts if any(mark in leaf for mark in _OF_CODES)}
    for (module, _, leaf), (name, tensor) in zip(parts, stored.items(), strict=True):
        are_codes = leaf in _CODES or (leaf == "weight" and tensor.extent.dtype in ("int8", "uint8"))
        if are_codes and module not in scaled:
            yield name, tensor


def _check_dtypes(listing: Listing, config: Mapping[str, Any], is_quantized: bool) -> None:
    """Compare the dtypes of floating-point tensors with that of `config.json`.

    Vectors in float32 are skipped, because many models keep norms and biases of routers in it.
    """
    places = (config, text_section(config) or {})
    declared = next((place[key] for place in places for key in ("dtype", "torch_dtype") if place.get(key)), None)
    if not isinstance(declared, str) or declared.removeprefix("torch.") not in _FLOATS:
        return
    declared = declared.removeprefix("torch.")
    others: defaultdict[str, list[ListedTensor]] = defaultdict(list)
    for tensor in listing:
        dtype = tensor.extent.dtype
        is_kept = dtype == "float32" and (len(tensor.shape) < 2 or is_quantized)
        if dtype in _FLOATS and dtype != declared and not tensor.is_scale and not is_kept:
            others[dtype].append(tensor)
    for dtype, tensors in others.items():
        names = join_some([tensor.name for tensor in tensors], _SHOWN)
        stored = f"{quantity(len(tensors), 'tensor is', 'tensors are')} in {dtype}"
        message = f"{stored}, where config.json states {declared}: {names}"
        listing.add("dtypes", tensors[0].extent.file, message, is_error=False)
    listing.dtypes = f"{declared}, as config.json states"


def _below(below: str, name: str) -> str:
    return f"{below}/{name}" if below else name
