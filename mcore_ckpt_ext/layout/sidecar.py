"""The sidecar `mcore_ckpt_ext.json`: the layout of the gradient buffers, recorded while it was known.

It is a witness like any other: what it says is constrained and proven before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FILE_NAME = "mcore_ckpt_ext.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class RecordedParameter:
    """A parameter at elements `[start, stop)` of its bucket."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class RecordedBucket:
    """One bucket with its parameters in the order of the buffer."""

    buffer: int
    dtypes: str
    bucket: int
    numel: int
    numel_unpadded: int
    parameters: tuple[RecordedParameter, ...]


@dataclass(frozen=True)
class RecordedGroup:
    """The buffers of the optimizer groups `indices`, which tensor-parallel siblings share word for word."""

    child: int
    indices: tuple[int, ...]
    buckets: tuple[RecordedBucket, ...]


@dataclass(frozen=True)
class Sidecar:
    """What the file holds: who wrote it, of which job, and the groups."""

    written_by: str
    megatron: str
    iteration: int
    layout: Mapping[str, int]
    groups: tuple[RecordedGroup, ...]

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Sidecar:
        """Parse the file's text.

        Raises:
            ValueError: it is no sidecar of a version known here.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            if data["version"] != VERSION:
                raise ValueError(f"sidecar version {data['version']}, known is {VERSION}")
            return cls(
                written_by=str(data["written_by"]),
                megatron=str(data["megatron"]),
                iteration=int(data["iteration"]),
                layout={str(name): int(size) for name, size in data["layout"].items()},
                groups=tuple(_group(group) for group in data["groups"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the sidecar lacks or misspells {error}") from error


def _group(data: Mapping[str, Any]) -> RecordedGroup:
    return RecordedGroup(
        child=int(data["child"]),
        indices=tuple(int(index) for index in data["indices"]),
        buckets=tuple(
            RecordedBucket(
                buffer=int(bucket["buffer"]),
                dtypes=str(bucket["dtypes"]),
                bucket=int(bucket["bucket"]),
                numel=int(bucket["numel"]),
                numel_unpadded=int(bucket["numel_unpadded"]),
                parameters=tuple(
                    RecordedParameter(str(item["name"]), int(item["start"]), int(item["stop"]))
                    for item in bucket["parameters"]
                ),
            )
            for bucket in data["buckets"]
        ),
    )
