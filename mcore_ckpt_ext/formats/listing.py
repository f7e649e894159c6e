"""The stored tensors of a folder of weights, and problems of its files, independent of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mcore_ckpt_ext.errors import CheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.planning.array_location import PlainExtent
from mcore_ckpt_ext.storage.files import FolderReader

About = Literal["files", "tensors", "dtypes", "scales"]


@dataclass(frozen=True, slots=True)
class ListedTensor:
    """A stored tensor, which starts at element `first` of an array; its shape is in elements.

    `is_scale`: it contains scales of quantized weights.
    """

    name: str
    shape: tuple[int, ...]
    extent: PlainExtent
    first: int = 0
    is_scale: bool = False


@dataclass(frozen=True, slots=True)
class ListingProblem:
    """A problem of a folder, as an error or a warning.

    `file`, and `offset` in bytes, are set if it has one location.
    """

    about: About
    where: str
    what: str
    file: str | None = None
    offset: int | None = None
    is_error: bool = True


@dataclass
class Listing:
    """The stored tensors of a folder, and its problems.

    Attributes:
        folder: the folder.
        reader: reads the folder's files.
        tensors: the tensors of all readable files.
        problems: problems of the files, except those of tensor values.
        archives: files that are torch archives, which contain checksums.
        unread: files that are damaged or of an unsupported type.
        files: the expected number of tensor files.
        dtypes: which dtypes were compared with which; empty if no file declares dtypes.
        has_signed_scales: whether scales may be negative, as those of AutoRound (`quant_tensor_sym`,
            auto_round/data_type/int.py, commit b9f3d007).
        described: tensors whose name and shape were compared with the configuration.
    """

    folder: Path
    reader: FolderReader
    tensors: list[ListedTensor] = field(default_factory=list)
    problems: list[ListingProblem] = field(default_factory=list)
    archives: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    files: int = 0
    dtypes: str = ""
    has_signed_scales: bool = False
    described: set[str] = field(default_factory=set)

    @property
    def is_readable(self) -> bool:
        """Return whether no file is missing or damaged."""
        return not any(problem.is_error for problem in self.problems)

    def add(self, about: About, file: str, what: str, *, offset: int | None = None, is_error: bool = True) -> None:
        """Add a problem of a file."""
        self.problems.append(ListingProblem(about, str(self.folder / file), what, file, offset, is_error))

    def add_refusal(self, file: str, problem: CheckpointError) -> None:
        """Add the error of a file; as a warning if the file may be intact but its type is not supported."""
        detail = f": {problem.details['found']}" if "found" in problem.details else ""
        is_error = not isinstance(problem, UnsupportedCheckpointError)
        self.add("files", file, f"{problem.message}{detail}" + ("" if is_error else "; not checked"), is_error=is_error)
        self.unread.add(file)

    def __iter__(self) -> Iterator[ListedTensor]:
        return iter(self.tensors)
