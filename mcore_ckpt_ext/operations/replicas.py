"""Compares copies of one tensor on several ranks, such as replicated norms and tied embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from mcore_ckpt_ext.errors import join_some
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.model_space.anatomy import is_word_embeddings
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.optimizers.tied_copies import different_elements
from mcore_ckpt_ext.planning.plan import StoredSlice
from mcore_ckpt_ext.transfer import Transfer


@dataclass(frozen=True)
class ComparedCopy:
    """A copy compared with the first: number, elements, elements that differ in bits, and both files."""

    number: int
    elements: int
    different: int
    places: str


def compared_copies(checkpoint: CheckpointView, kind: str, name: str, transfer: Transfer) -> Iterator[ComparedCopy]:
    """Yield each copy of a part of a tensor, compared with the first copy of that part.

    Raises:
        CheckpointError: a copy cannot be read.
    """
    tensor = checkpoint.logical_tensor(kind, name)
    if tensor is None:
        return
    for first, *others in checkpoint.copies(kind, name):
        for number, copy in enumerate(others, start=1):
            different = different_elements(tensor, kind, first, copy, transfer)
            elements = sum(stored.slice.numel for stored in copy)
            yield ComparedCopy(number, elements, different, f"{_place(first)} and {_place(copy)}")


def is_left_by_offload(checkpoint: CheckpointView, kind: str, name: str) -> bool:
    """Return True if the running job itself had different copies (`optimizers/tied_copies.py`)."""
    return kind != WEIGHT and is_word_embeddings(name) and bool(checkpoint.job.arguments().optimizer_cpu_offload)


def differing_copies(checkpoint: CheckpointView, kinds: Iterable[str], share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return the kind, name and files of each tensor whose copies differ.

    Args:
        checkpoint: the checkpoint; the packing of its buffers must be known for kinds of the optimizer.
        kinds: the kinds to compare.
        share: the part of the names to compare: the number of this process, and the number of processes.

    Raises:
        CheckpointError: a copy cannot be read.
    """
    transfer = Transfer(checkpoint.files.reader.past_cache(), workers=1)
    texts = []
    for kind in kinds:
        shifted = shifted_names(checkpoint, kind)
        for name in checkpoint.names(kind)[share[0] :: share[1]]:
            texts += differing_copies_of(checkpoint, kind, name, shifted, transfer)
    return texts


def shifted_names(checkpoint: CheckpointView, kind: str) -> frozenset[str]:
    """Return the parameters whose arrays of a kind are stored shifted.

    The shift is described in `workarounds/fully_reshardable_padding.py`.
    """
    return frozenset(checkpoint.optimizer.state().shifted if kind != WEIGHT else ())


def differing_copies_of(
    checkpoint: CheckpointView, kind: str, name: str, shifted: Set[str], transfer: Transfer
) -> list[str]:
    """Do what `differing_copies` does for one tensor; the result is empty if its copies are equal."""
    if name in shifted or is_left_by_offload(checkpoint, kind, name):
        return []
    places = [copy.places for copy in compared_copies(checkpoint, kind, name, transfer) if copy.different]
    return [f"{kind} {name} ({places[0]})"] if places else []


def differing_copies_note(tensors: Sequence[str], count: int) -> str:
    """Return a note about `count` tensors whose copies differ."""
    more = "" if count == len(tensors) else f", and others: {count} in all"
    return f"replicas of a tensor differ between ranks; the first is used: {join_some(tensors, 3)}{more}"


def _place(copy: Sequence[StoredSlice]) -> str:
    return join_some(list(dict.fromkeys(stored.extent.file for stored in copy)), 2)
