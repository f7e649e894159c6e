"""What a run has shown, and the table of it in the README."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.versions.jobs import Layout, Source

BEGIN, END = "<!-- matrix: made by tests/versions -->", "<!-- end of matrix -->"
DIMENSIONS = ("TP", "PP", "VPP", "EP", "DP", "several buckets", "tied embeddings")


@dataclass
class Shown:
    """What was equal for one release and format.

    Attributes:
        offline: jobs whose checkpoint was read back without Megatron.
        targets: layouts whose live optimizers were filled.
        pairs: pairs of such a checkpoint and such a target, by the dimension in which they differ.
    """

    offline: set[str] = field(default_factory=set)
    targets: set[str] = field(default_factory=set)
    pairs: Counter[str] = field(default_factory=Counter)

    def add(self, source: Source, target: Layout) -> None:
        """A target that was filled from a source, and was equal."""
        self.targets.add(str(target))
        self.pairs.update(_differences(source, target))

    def as_json(self) -> dict[str, Any]:
        """For the run's record."""
        return {"offline": sorted(self.offline), "targets": sorted(self.targets), "pairs": dict(self.pairs)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Shown:
        """The reverse of `as_json`."""
        return cls(set(record["offline"]), set(record["targets"]), Counter(record["pairs"]))

    def cells(self) -> list[str]:
        """Of the table, behind release and format; what was not shown is empty."""
        counts = [len(self.offline), len(self.targets), *(self.pairs[name] for name in DIMENSIONS)]
        return [str(count) if count else "" for count in counts]


def _differences(source: Source, target: Layout) -> list[str]:
    """The dimensions that differ between writer and reader; and of buckets and embeddings, what either had."""
    written = source.layout
    found = {
        "TP": written.tensor != target.tensor,
        "PP": written.pipeline != target.pipeline,
        "VPP": written.virtual != target.virtual,
        "EP": written.expert != target.expert,
        "DP": written.data != target.data,
        "several buckets": bool(written.bucket_size or target.bucket_size),
        "tied embeddings": source.model[1],
    }
    return [name for name, differs in found.items() if differs]


def table(shown: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """The README's table of a record, by release and format: one line a row."""
    head = ["Megatron", "format", "offline", "live", *DIMENSIONS]
    rows = [head, ["---"] * len(head)]
    for version in sorted(shown, key=lambda text: [int(part) for part in text.split(".")]):
        for name, record in shown[version].items():
            rows.append([version, f"`{name}`", *Shown.from_json(record).cells()])
    return [f"| {' | '.join(row)} |" for row in rows]
