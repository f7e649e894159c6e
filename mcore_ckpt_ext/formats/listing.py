"""A folder of weights as a list of stored tensors, and what is wrong with its files, whatever its model."""

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
    """A tensor as it is stored: from element `first` of an array on; shape in elements.

    `is_scale`: it holds scales of quantized weights.
    """

    name: str
    shape: tuple[int, ...]
    extent: PlainExtent
    first: int = 0
    is_scale: bool = False


@dataclass(frozen=True, slots=True)
class ListingProblem:
    """What is wrong with a folder; `file` and `offset` in bytes where it is of one place. A warning if not an error."""

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
        reader: of the folder's files.
        tensors: of the files that can be read.
        problems: what is wrong with the files, apart from the tensors' values.
        archives: files that are torch archives, which have checksums of their own.
        unread: files that are damaged, or of a kind that is not read.
        files: how many files of tensors there should be.
        dtypes: which dtypes were compared with which; empty where nothing states any.
    """

    folder: Path
    reader: FolderReader
    tensors: list[ListedTensor] = field(default_factory=list)
    problems: list[ListingProblem] = field(default_factory=list)
    archives: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    files: int = 0
    dtypes: str = ""

    @property
    def is_readable(self) -> bool:
        """Whether no file is missing or damaged."""
        return not any(problem.is_error for problem in self.problems)

    def add(self, about: About, file: str, what: str, *, offset: int | None = None, is_error: bool = True) -> None:
        """Add a problem of a file."""
        self.problems.append(ListingProblem(about, str(self.folder / file), what, file, offset, is_error))

    def add_refusal(self, file: str, problem: CheckpointError) -> None:
        """Add the refusal of a file: a warning where it may be intact, but is of a kind that is not read."""
        found = f": {problem.details['found']}" if "found" in problem.details else ""
        is_error = not isinstance(problem, UnsupportedCheckpointError)
        self.add("files", file, f"{problem.message}{found}" + ("" if is_error else "; not checked"), is_error=is_error)
        self.unread.add(file)

    def __iter__(self) -> Iterator[ListedTensor]:
        return iter(self.tensors)
