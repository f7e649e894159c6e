"""The files of a job's data set when the job began: the blend that they name, and their sizes.

Megatron's arguments name these files alone, whose content may be another one when a job is resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.job.job_arguments import JobArguments

RECORD = "ckpt_ext_data_files"
"""The argument, saved with Megatron's in every checkpoint, with what the files contained."""
BLEND_FILES = ("data_args_path", "per_split_data_args_path")
"""The arguments that name a file with the blend."""
BLEND_ARGUMENTS = ("data_path", "train_data_path", *BLEND_FILES)
"""The arguments that name the blend that a job trains on, or a file with it."""


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of a data set.

    Attributes:
        words: the words for training of the file that names the blend, as those of `--data-path`; empty if flags name
            it, or if it is unknown.
        sizes: the bytes of each data set, in the order of the blend; empty if they are unknown.
    """

    words: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, job: JobArguments) -> DataFiles:
        """Return what a job recorded; empty if it has recorded nothing, or something that no job writes."""
        recorded = job.raw.get(RECORD)
        if not isinstance(recorded, dict):
            return cls()
        return cls(_all_of(str, recorded.get("words")), _all_of(int, recorded.get("sizes")))

    def as_argument(self) -> dict[str, Any]:
        """Return the value of the argument `RECORD`."""
        return {"words": list(self.words), "sizes": list(self.sizes)}


def values_or_contents(name: str, written: JobArguments, running: JobArguments) -> Sequence[Any]:
    """Return the values of an argument in two jobs, or the recorded contents of the files that it names."""
    values = [job.raw.get(name) for job in (written, running)]
    if name not in BLEND_FILES or not all(values):
        return values
    contents = [DataFiles.of(job).words for job in (written, running)]
    return contents if all(contents) else values


def have_same_sizes(written: JobArguments, running: JobArguments) -> bool:
    """Return whether the data sets of two jobs are known to have the same sizes."""
    old, new = (DataFiles.of(job).sizes for job in (written, running))
    return bool(old) and old == new


def _all_of(kind: type, values: object) -> tuple[Any, ...]:
    if not isinstance(values, list) or any(type(value) is not kind for value in values):
        return ()
    return tuple(values)
