"""Addresses and sizes of device memory, which can be compared, but not read from."""

from __future__ import annotations

import torch


class Address:
    """The address of a device tensor, which can be compared, but not read from."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)


class Storage:
    """The size of a device tensor's memory, and its users."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._cdata = storage._cdata

    def nbytes(self) -> int:
        return self._storage.nbytes()
