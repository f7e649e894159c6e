"""The sidecar `mcore_ckpt_ext.json`: the packing of the gradient buffers, recorded while it was known.

It is one of several sources of the parameter order: its packing is checked like any other before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

from mcore_ckpt_ext.layout.additive_checksum import read, written
from mcore_ckpt_ext.storage.budget import Budget, check_keys, whole_number
from mcore_ckpt_ext.storage.json_text import parsed

FILE_NAME = "mcore_ckpt_ext.json"
VERSION = 1
MOST_BYTES = 256 << 20
"""A few kilobytes a pipeline stage are usual."""


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


def orders_of(groups: Iterable[RecordedGroup]) -> dict[tuple[int, int], str]:
    """As of `Sidecar.order`: digests, which do not depend on the number of data-parallel ranks, as padding does."""
    found: dict[tuple[int, int], str] = {}
    for group in groups:
        places = [
            (one.buffer, one.dtypes, one.bucket, [(own.name, own.start, own.stop) for own in one.parameters])
            for one in group.buckets
        ]
        digest = blake2b(repr(places).encode(), digest_size=8).hexdigest()
        found |= {(group.child, index): digest for index in group.indices}
    return found


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """What a save took: written when all of the checkpoint was on disk, and before the tracker file named it.

    Attributes:
        asynchronous: whether training went on meanwhile.
        bytes: of all records.
        seconds_stalled: how long training stood still, on rank 0.
        seconds_in_background: from there until all was on disk.
    """

    asynchronous: bool
    bytes: int
    seconds_stalled: float
    seconds_in_background: float


@dataclass(frozen=True)
class RecordedDigests:
    """Digests (`layout/additive_checksum.py`) of the optimizer's state as it was saved, where masters are remainders.

    Attributes:
        child: the chained optimizer.
        index: its group, as in `RecordedGroup.indices`.
        parameters: for each parameter's name, by kind, the digest of its elements in the order of the buffer, 16
            hexadecimal digits.
    """

    child: int
    index: int
    parameters: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Sidecar:
    """What the file holds: who wrote it, of which job, the groups, and, if recorded, what the save took and digests.

    A sidecar without them, of an earlier release or of a job that needs none, is as good as one with them.

    Attributes:
        index: the digest (`dcp_index.index_digest`) of the index that the save wrote; empty where it was not recorded.
    """

    written_by: str
    megatron: str
    iteration: int
    layout: Mapping[str, int]
    groups: tuple[RecordedGroup, ...]
    saved: SaveRecord | None = None
    digests: tuple[RecordedDigests, ...] = ()
    index: str = ""

    def order(self) -> dict[tuple[int, int], str]:
        """For each child and group of its, what tells one order of parameters in their buffers from another."""
        return orders_of(self.groups)

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Sidecar:
        """Parse the file's text.

        Raises:
            ValueError: it is not a sidecar of a version known here, or it says something twice.
            OverBudgetError: it stands for more parameters than its size explains.
        """
        try:
            budget = Budget(len(text), FILE_NAME)
            data: dict[str, Any] = parsed(text)
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


def with_index(text: str, digest: str) -> str:
    """The text of a sidecar, which now names the index that it lies beside."""
    return json.dumps({**json.loads(text), "index": digest}, separators=(",", ":")) + "\n"


def _check_unique(groups: Sequence[RecordedGroup]) -> None:
    """A rank has an optimizer's group once, and in it each parameter once; parameters of one value could stand twice.

    Raises:
        ValueError: something is named twice.
    """
    check_keys([(group.child, index) for group in groups for index in group.indices])
    seen: set[tuple[int, int]] = set()
    for group in groups:
        keys = [(group.child, index) for index in group.indices]
        if len(set(keys)) < len(keys) or not seen.isdisjoint(keys):
            raise ValueError(f"the sidecar records a group of {keys[:4]} twice")
        seen.update(keys)
        names: set[str] = set()
        for parameter in (parameter for bucket in group.buckets for parameter in bucket.parameters):
            if parameter.name in names:
                raise ValueError(f"the sidecar names {parameter.name} twice in one group")
            names.add(parameter.name)


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
        str(name): {str(kind): written(read(digest)) for kind, digest in kinds.items()}
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
