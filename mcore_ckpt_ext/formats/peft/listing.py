"""Checks the files of a PEFT folder without the model of the adapters.

Source: `LoraLayer.update_layer` (tuners/lora/layer.py, peft 0.21.2): the rank is the number of rows of `lora_A`, and
the number of columns of `lora_B`.
"""

from __future__ import annotations

from pathlib import Path

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.formats.hugging_face.folder import ADAPTER
from mcore_ckpt_ext.formats.hugging_face.listing import list_file
from mcore_ckpt_ext.formats.listing import ListedTensor, Listing
from mcore_ckpt_ext.planning.array_location import QuantizedMatrix
from mcore_ckpt_ext.storage.json_text import read_json
from mcore_ckpt_ext.storage.remote import folder_reader

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_A = ".lora_A."
_B = ".lora_B."


def list_adapters(folder: Path) -> Listing:
    """List the tensors of a folder of adapters, and the problems of its files."""
    listing = Listing(folder, folder_reader(folder))
    try:
        read_json(folder / ADAPTER)
    except UnreadableCheckpointError as problem:
        listing.add_refusal(ADAPTER, problem)
    file = next((name for name in ADAPTER_FILES if (folder / name).exists()), None)
    if file is None:
        listing.add("files", "", f"no adapters: there is no {' and no '.join(ADAPTER_FILES)}")
        return listing
    listing.files = 1
    for name, tensor in list_file(listing, file):
        if not isinstance(tensor.extent, QuantizedMatrix):
            listing.tensors.append(ListedTensor(name, tensor.shape, tensor.extent, tensor.first))
    _check_pairs(listing, file)
    return listing


def _check_pairs(listing: Listing, file: str) -> None:
    shapes = {tensor.name: tensor.shape for tensor in listing}
    for name, shape in shapes.items():
        other = name.replace(_A, _B) if _A in name else name.replace(_B, _A)
        if other == name:
            continue
        if other not in shapes:
            listing.add("tensors", file, f"{name} has no {other}")
        elif _A in name and len(shape) == 2 and len(shapes[other]) == 2 and shape[0] != shapes[other][1]:
            listing.add("tensors", file, f"{name} is {shape}, and {other} is {shapes[other]}: their ranks differ")
