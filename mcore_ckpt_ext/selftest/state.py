"""The live state of a job's ranks as pieces of whole tensors, and the bitwise comparison of two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.layout.master_check import bits_dtype

WEIGHT = "weight"
_MOST_NAMED = 5


@dataclass(frozen=True)
class Piece:
    """The part of a tensor on one rank.

    Attributes:
        kind: `weight`, `param` (the fp32 master), `exp_avg`, ...
        key: name of the parameter, the same under each layout.
        shape: shape of the whole tensor.
        offset: position of the piece in the whole tensor.
        prepended: number of leading dimensions that the piece itself lacks, for example that of stacked layers.
        values: the elements.
        held: a mask of the elements that this rank has; None for all.
    """

    kind: str
    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    prepended: int
    values: torch.Tensor
    held: torch.Tensor | None = None

    @property
    def place(self) -> tuple[int | slice, ...]:
        """The index of the piece in the whole tensor."""
        ranges = zip(self.offset[self.prepended :], self.values.shape, strict=True)
        return (*self.offset[: self.prepended], *(slice(start, start + size) for start, size in ranges))


@dataclass
class State:
    """All pieces of the ranks, and the optimizer's state that is not a tensor.

    Attributes:
        pieces: pieces of tensors.
        settings: by parameter, the options of its parameter group: step, learning rate, weight decay.
        progress: iteration, consumed samples, and the state of the learning rate scheduler.
    """

    pieces: list[Piece] = field(default_factory=list)
    settings: dict[str, dict[str, float]] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write one rank's part."""
        path.parent.mkdir(parents=True, exist_ok=True)
        pieces = [vars(piece) for piece in self.pieces]
        torch.save({"pieces": pieces, "settings": self.settings, "progress": self.progress}, path)

    @classmethod
    def load(cls, folder: Path) -> State:
        """Read the parts of all ranks."""
        state = cls()
        for path in sorted(folder.glob("rank_*.pt")):
            content = torch.load(path, weights_only=True)
            state.pieces += [Piece(**piece) for piece in content["pieces"]]
            state.settings |= content["settings"]
            state.progress |= content["progress"]
        return state


@dataclass
class _Whole:
    """A tensor assembled from pieces, and a mask of its known elements."""

    values: torch.Tensor
    held: torch.Tensor

    @classmethod
    def of(cls, piece: Piece) -> _Whole:
        """Return an empty tensor with the shape and dtype of a piece's whole tensor."""
        return cls(torch.zeros(piece.shape, dtype=piece.values.dtype), torch.zeros(piece.shape, dtype=torch.bool))

    def agrees(self, piece: Piece, *, wants_all: bool) -> bool:
        """Compare a piece with the known elements; with `wants_all`, all of its elements must be known."""
        if self.values.shape != piece.shape or self.values.dtype != piece.values.dtype:
            return False
        held = piece.held if piece.held is not None else torch.ones_like(piece.values, dtype=torch.bool)
        there = self.held[piece.place]
        if wants_all and bool((held & ~there).any()):
            return False
        same = _bits(self.values[piece.place]) == _bits(piece.values)
        return bool((same | ~(held & there)).all())

    def add(self, piece: Piece) -> None:
        """Copy the elements of a piece."""
        held = piece.held if piece.held is not None else torch.ones_like(piece.values, dtype=torch.bool)
        self.values[piece.place] = torch.where(held, piece.values, self.values[piece.place])
        self.held[piece.place] |= held


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(bits_dtype(values.element_size()))


def number_of_elements(state: State) -> int:
    """Return the number of elements of all whole tensors."""
    return sum(
        torch.Size(shape).numel() for shape in {(piece.kind, piece.key): piece.shape for piece in state.pieces}.values()
    )


def assemble(state: State) -> State:
    """Assemble the pieces of each tensor.

    Raises:
        ValueError: replicas of a tensor differ, or elements are missing.
    """
    pieces = []
    for (kind, key), parts in _group_by_tensor(state.pieces).items():
        whole, *others = _replicas(parts)
        if others or not whole.held.all():
            raise ValueError(f"{kind}.{key} is not one whole tensor")
        pieces.append(Piece(kind, key, tuple(whole.values.shape), (0,) * whole.values.dim(), 0, whole.values))
    return State(pieces, state.settings, state.progress)


def differences(saved: State, loaded: State) -> list[str]:
    """Describe how a state differs from the one at the save: some tensors by name, the number of others.

    Replicas of a tensor may differ at the save, because kernels may sum in any order. Each loaded piece has to equal
    one of them, and all elements have to be loaded.
    """
    expected = _group_by_tensor(saved.pieces)
    actual = _group_by_tensor(loaded.pieces)
    replicas = {name: _replicas(pieces) for name, pieces in expected.items()}
    unequal = [
        ".".join(name)
        for name in sorted(expected.keys() | actual.keys())
        if not _is_equal(replicas.get(name, []), actual.get(name, []))
    ]
    lines = [f"{name} differs" for name in unequal[:_MOST_NAMED]]
    if len(unequal) > _MOST_NAMED:
        lines.append(f"{len(unequal) - _MOST_NAMED} more of {quantity(len(expected), 'tensor')} differ")
    return [
        *lines,
        *_compare_mappings("the settings of", saved.settings, loaded.settings),
        *_compare_mappings("progress:", saved.progress, loaded.progress),
    ]


def _group_by_tensor(pieces: Iterable[Piece]) -> dict[tuple[str, str], list[Piece]]:
    by_tensor: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_tensor[piece.kind, piece.key].append(piece)
    return by_tensor


def _replicas(pieces: Iterable[Piece]) -> list[_Whole]:
    """Assemble pieces into one tensor, or into several if replicas differ."""
    replicas: list[_Whole] = []
    for piece in pieces:
        whole = next((replica for replica in replicas if replica.agrees(piece, wants_all=False)), None)
        if whole is None:
            whole = _Whole.of(piece)
            replicas.append(whole)
        whole.add(piece)
    return replicas


def _is_equal(replicas: list[_Whole], pieces: list[Piece]) -> bool:
    if not replicas or not pieces:
        return False
    if not all(any(replica.agrees(piece, wants_all=True) for replica in replicas) for piece in pieces):
        return False
    loaded = _Whole.of(pieces[0])
    for piece in pieces:
        loaded.add(piece)
    return bool((loaded.held | ~replicas[0].held).all())


def _compare_mappings(subject: str, saved: Mapping[str, Any], loaded: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(saved.keys() | loaded.keys()):
        if saved.get(name) != loaded.get(name):
            yield f"{subject} {name}: {saved.get(name)} at the save, {loaded.get(name)} after the load"
            return
