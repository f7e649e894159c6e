"""Where a tensor's elements lie in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.storage.dtypes import Dtype
from mcore_ckpt_ext.storage.files import FolderReader


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a tensor's elements lie: byte `offset` of `file`, `numel` elements of `dtype`, row-major in `shape`.

    Attributes:
        scaled: where the elements are fp8 numbers: what they are multiplied by, and what they then are rounded to.
    """

    file: str
    offset: int
    dtype: Dtype
    shape: tuple[int, ...]
    scaled: tuple[float, Dtype] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def gives(self) -> Dtype:
        """The dtype of the elements once they are decoded."""
        return self.dtype if self.scaled is None else self.scaled[1]

    def decoded(self, elements: torch.Tensor) -> torch.Tensor:
        """The elements as the tensor shows them; as they lie, unless they are fp8 numbers."""
        if self.scaled is None:
            return elements
        scale, dtype = self.scaled
        return elements.float().mul_(scale).to(dtype.torch)


@dataclass(frozen=True, slots=True)
class ArchiveTemplate:
    """What the archives of all tensors of one shape and dtype have in common: all but elements and checksums.

    Attributes:
        length: of the archive.
        front: what precedes the elements: the description of the tensor.
        directory: what the archive ends in.
        kept: the parts of the directory between its checksums.
        dtype: of the elements.
        shape: of the tensor.
    """

    length: int
    front: bytes
    directory: bytes
    kept: Sequence[slice]
    dtype: Dtype
    shape: tuple[int, ...]

    def payload(self, reader: FolderReader, file: str, offset: int) -> TensorLocation | None:
        """Where the elements of the archive at that place lie; None where it is not such a one."""
        if reader.read(file, offset, len(self.front)) != self.front:
            return None
        directory = reader.read(file, offset + self.length - len(self.directory), len(self.directory))
        if any(directory[part] != self.directory[part] for part in self.kept):
            return None
        return TensorLocation(file, offset + len(self.front), self.dtype, self.shape)
