"""Lists the files of a folder that ColossalAI's Booster saved: weights and shards of the optimizer."""

from __future__ import annotations

from pathlib import Path

from mcore_ckpt_ext.errors import ContentError
from mcore_ckpt_ext.formats.colossalai.folder import optimizer_index_of, optimizer_indices, states_of, weights_below
from mcore_ckpt_ext.formats.hugging_face.listing import list_model
from mcore_ckpt_ext.formats.listing import ListedTensor, Listing
from mcore_ckpt_ext.planning.array_location import QuantizedMatrix


def list_checkpoint(folder: Path) -> Listing:
    """List the tensors of a checkpoint, and the problems of its files."""
    listing = list_model(folder, weights_below(folder) or "")
    for path in optimizer_indices(folder):
        place = path.relative_to(folder).as_posix()
        try:
            index = optimizer_index_of(folder, path)
        except ContentError as problem:
            listing.add_refusal(place, problem)
            continue
        for file, expected in index.files.items():
            _list_states(listing, file, expected)
        listing.files += len(index.files) + 1
        if index.group_file.endswith(".bin"):
            listing.archives.append(index.group_file)
    return listing


def _list_states(listing: Listing, file: str, expected: set[str]) -> None:
    try:
        states = [state for state in states_of(listing.reader, file) if state[0] in expected]
    except ContentError as problem:
        listing.add_refusal(file, problem)
        return
    if file.endswith(".bin"):
        listing.archives.append(file)
    if missing := sorted(expected - {parameter for parameter, _, _ in states}):
        listing.add("tensors", file, f"its index lists states that it does not hold: parameters {', '.join(missing)}")
    for parameter, kind, tensor in states:
        if tensor is not None and not isinstance(tensor.extent, QuantizedMatrix):
            name = f"{kind} of parameter {parameter}"
            listing.tensors.append(ListedTensor(name, tensor.shape, tensor.extent, tensor.first))
