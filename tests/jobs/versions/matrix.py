"""The results of a run, and their table in the documentation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.jobs.versions.jobs import Layout, Source

BEGIN, END = "<!-- matrix: made by tests/jobs/versions -->", "<!-- end of matrix -->"
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

    def row(self, version: str, name: str) -> str:
        """The row of the documentation's table; what was not shown is empty."""
        counts = [len(self.offline), len(self.targets), *(self.pairs[dimension] for dimension in DIMENSIONS)]
        cells = [version, f"`{name}`", *(str(count) if count else "" for count in counts)]
        return f"| {' | '.join(cells)} |"


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


def version_of(row: str) -> tuple[int, ...]:
    """The release that a row of the table is about."""
    return tuple(int(part) for part in row.split(" ")[1].split("."))
