"""The sidecar `mcore_ckpt_ext.json`: the packing of the gradient buffers, recorded during the save.

It is one of several sources of the parameter order: its packing is checked like any other before it is used.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

from mcore_ckpt_ext.layout.additive_digest import format_digest, parse_digest
from mcore_ckpt_ext.storage.budget import Budget, check_keys, whole_number
from mcore_ckpt_ext.storage.json_text import parse_json

FILE_NAME = "mcore_ckpt_ext.json"
VERSION = 1
MOST_BYTES = 256 << 20
"""A few kilobytes per pipeline stage are usual."""


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
    """The buffers of optimizer groups that are equal, such as those of tensor-parallel ranks, by index."""

    child: int
    indices: tuple[int, ...]
    buckets: tuple[RecordedBucket, ...]


def order_digests(groups: Iterable[RecordedGroup]) -> dict[tuple[int, int], str]:
    """Return a digest of each group's parameter order, which does not depend on data-parallel padding."""
    digests: dict[tuple[int, int], str] = {}
    for group in groups:
        places = [
            (
                bucket.buffer,
                bucket.dtypes,
                bucket.bucket,
                [(parameter.name, parameter.start, parameter.stop) for parameter in bucket.parameters],
            )
            for bucket in group.buckets
        ]
        digest = blake2b(repr(places).encode(), digest_size=8).hexdigest()
        digests |= {(group.child, index): digest for index in group.indices}
    return digests


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """The duration of a save.

    It is recorded after all files are on disk and before the tracker file names the checkpoint.

    Attributes:
        asynchronous: whether training continued during the save.
        bytes: size of all records.
        seconds_stalled: how long training was stopped, on rank 0.
        seconds_in_background: time from then until all files were on disk.
    """

    asynchronous: bool
    bytes: int
    seconds_stalled: float
    seconds_in_background: float


@dataclass(frozen=True)
class RecordedDigests:
    """Digests of the optimizer's state at the save, for masters stored as remainders.

    They are those of `layout/additive_digest.py`.

    Attributes:
        child: the number of the chained optimizer.
        index: its group, as in `RecordedGroup.indices`.
        parameters: by parameter name and kind, the digest of its elements in the order of the buffer, 16 hexadecimal
            digits.
    """

    child: int
    index: int
    parameters: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Sidecar:
    """The content of the file: versions, the job's layout, the groups, the save's duration and digests.

    Duration and digests are optional, because not all jobs need them.

    Attributes:
        index: the digest (`dcp_index.index_digest`) of the index that the save wrote; empty if it was not recorded.
    """

    written_by: str
    megatron: str
    iteration: int
    layout: Mapping[str, int]
    groups: tuple[RecordedGroup, ...]
    saved: SaveRecord | None = None
    digests: tuple[RecordedDigests, ...] = ()
    index: str = ""

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Sidecar:
        """Parse the file's text.

        Raises:
            ValueError: it is not a sidecar of a supported version, or contains duplicates.
            OverBudgetError: it describes more parameters than its size explains.
        """
        try:
            budget = Budget(len(text), FILE_NAME)
            data: dict[str, Any] = parse_json(text)
            if data["version"] != VERSION:
                raise ValueError(f"sidecar version {data['version']}, known is {VERSION}")
            groups = tuple(_group(group) for group in data["groups"])
            for group in groups:
                parameters = sum(len(bucket.parameters) for bucket in group.buckets)
                budget.spend(len(group.indices) * parameters, "the parameters of all groups")
            _check_unique(groups)
            return cls(
                written_by=str(data["written_by"]),
                megatron=str(data["megatron"]),
                iteration=whole_number(data["iteration"], "iteration"),
                layout={str(name): whole_number(size, "layout") for name, size in data["layout"].items()},
                groups=groups,
                saved=_save_record(data.get("saved")),
                digests=tuple(_digests(group) for group in data.get("digests", ())),
                index=str(data.get("index", "")),
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"the sidecar lacks or misspells {error}") from error


def add_index_digest(text: str, digest: str) -> str:
    """Add the digest of the checkpoint's index to the text of a sidecar."""
    return json.dumps({**json.loads(text), "index": digest}, separators=(",", ":")) + "\n"


def _check_unique(groups: Sequence[RecordedGroup]) -> None:
    """Raise ValueError unless groups, and parameters within a group, are unique."""
    check_keys([(group.child, index) for group in groups for index in group.indices])
    seen: set[tuple[int, int]] = set()
    for group in groups:
        keys = [(group.child, index) for index in group.indices]
        if len(set(keys)) < len(keys) or not seen.isdisjoint(keys):
            raise ValueError(f"the sidecar records a group of {keys[:4]} twice")
        seen.update(keys)
        names = Counter(parameter.name for bucket in group.buckets for parameter in bucket.parameters)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"the sidecar names {repeated[0]} twice in one group")


def _save_record(data: Mapping[str, Any] | None) -> SaveRecord | None:
    if data is None:
        return None
    return SaveRecord(
        asynchronous=bool(data["asynchronous"]),
        bytes=whole_number(data["bytes"], "bytes"),
        seconds_stalled=float(data["seconds_stalled"]),
        seconds_in_background=float(data["seconds_in_background"]),
    )


def _digests(data: Mapping[str, Any]) -> RecordedDigests:
    parameters = {
        str(name): {str(kind): format_digest(parse_digest(digest)) for kind, digest in kinds.items()}
        for name, kinds in data["parameters"].items()
    }
    return RecordedDigests(whole_number(data["child"], "child"), whole_number(data["index"], "index"), parameters)


def _group(data: Mapping[str, Any]) -> RecordedGroup:
    return RecordedGroup(
        child=whole_number(data["child"], "child"),
        indices=tuple(whole_number(index, "indices") for index in data["indices"]),
        buckets=tuple(
            RecordedBucket(
                buffer=whole_number(bucket["buffer"], "buffer"),
                dtypes=str(bucket["dtypes"]),
                bucket=whole_number(bucket["bucket"], "bucket"),
                numel=whole_number(bucket["numel"], "numel"),
                numel_unpadded=whole_number(bucket["numel_unpadded"], "numel_unpadded"),
                parameters=tuple(
                    RecordedParameter(
                        str(item["name"]), whole_number(item["start"], "start"), whole_number(item["stop"], "stop")
                    )
                    for item in bucket["parameters"]
                ),
            )
            for bucket in data["buckets"]
        ),
    )
