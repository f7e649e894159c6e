"""The location of a tensor's elements in a file, and the template that finds it in like archives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.storage.dtypes import Dtype
from mcore_ckpt_ext.storage.files import FolderReader


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """The location of a tensor's elements: byte `offset` of `file`, row-major in `shape`, of `dtype`.

    Attributes:
        scaled: for fp8 elements, the scale and the dtype of the decoded elements; otherwise None.
    """

    file: str
    offset: int
    dtype: Dtype
    shape: tuple[int, ...]
    scaled: tuple[float, Dtype] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def decoded_dtype(self) -> Dtype:
        """The dtype of the elements once they are decoded."""
        return self.dtype if self.scaled is None else self.scaled[1]

    def decode(self, elements: torch.Tensor) -> torch.Tensor:
        """Return decoded elements: fp8 elements multiplied by their scale, all others unchanged."""
        if self.scaled is None:
            return elements
        scale, dtype = self.scaled
        return elements.float().mul_(scale).to(dtype.torch)


@dataclass(frozen=True, slots=True)
class ArchiveTemplate:
    """The common bytes of all archives of one shape and dtype: everything but elements and checksums.

    Attributes:
        length: length of the archive in bytes.
        front: the bytes before the elements: the description of the tensor.
        directory: the zip directory at the end of the archive.
        kept: the parts of the directory between its checksums.
        dtype: dtype of the elements.
        shape: shape of the tensor.
    """

    length: int
    front: bytes
    directory: bytes
    kept: Sequence[slice]
    dtype: Dtype
    shape: tuple[int, ...]

    def locate(self, reader: FolderReader, file: str, offset: int) -> TensorLocation | None:
        """Return the location of the elements in the archive at `offset` of `file`.

        Returns:
            None if the archive there does not match this template.
        """
        if reader.read(file, offset, len(self.front)) != self.front:
            return None
        directory = reader.read(file, offset + self.length - len(self.directory), len(self.directory))
        if any(directory[part] != self.directory[part] for part in self.kept):
            return None
        return TensorLocation(file, offset + len(self.front), self.dtype, self.shape)
