"""The jobs that are saved and resumed with each release, and how a run is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tests.harness.packages import installed_beside

ROOT = Path(__file__).parents[3]
_RANKS_FOLDER = Path(__file__).parent / "ranks"
_TIME_LIMIT = 400
INSTALLED = "0.19.2"
# Release: the Python that its wheel on PyPI was made for. What is compiled in it is not used here.
WHEELS = {
    "0.12.3": "3.11", "0.13.1": "3.11", "0.14.0": "3.12", "0.15.3": "3.12", "0.16.1": "3.12", "0.17.1": "3.12",
    "0.18.2": "3.12", INSTALLED: "",
}  # fmt: skip
# The one that writes every format, and the newest; a minute each. TEST_RELEASES names others, or all; each is a cell of
# the workflow's matrix.
OF_EVERY_RUN = ("0.15.3", INSTALLED)
_NAMED = os.environ.get("TEST_RELEASES", " ".join(OF_EVERY_RUN))
RELEASES = tuple(WHEELS) if _NAMED == "all" else tuple(_NAMED.split())

DP_RESHARDABLE, FULLY_RESHARDABLE = "dp_reshardable", "fully_reshardable"
MODEL_SPACE, DP_ZERO = "fully_sharded_model_space", "dp_zero_gather_scatter"
LEGACY, PLAIN = "legacy_torch", "legacy_torch_per_parameter"
_OLD, _NEW = (MODEL_SPACE, DP_ZERO), (DP_RESHARDABLE, FULLY_RESHARDABLE)
# What `save_checkpoint` of each release can write (megatron/training/checkpointing.py).
FORMATS = {
    "0.12.3": (*_OLD, LEGACY, PLAIN), "0.13.1": (*_OLD, LEGACY, PLAIN), "0.14.0": (*_OLD, LEGACY, PLAIN),
    "0.15.3": (*_NEW, *_OLD, LEGACY, PLAIN), "0.16.1": (*_NEW, LEGACY, PLAIN), "0.17.1": (*_NEW, LEGACY, PLAIN),
    "0.18.2": (*_NEW, LEGACY, PLAIN), INSTALLED: (*_NEW, LEGACY, PLAIN),
}  # fmt: skip
_NAMES = (*_NEW, *_OLD, LEGACY, PLAIN)
# What the name of a folder says of a model: (experts, tied embeddings).
DENSE, TIED, EXPERTS = (False, False), (False, True), (True, False)
_MODEL_NAMES = {DENSE: "dense", TIED: "tied", EXPERTS: "experts"}


@dataclass(frozen=True)
class Layout:
    """As `core_model.Layout`, and how many ranks there are."""

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    bucket_size: int | None = None

    @property
    def data(self) -> int:
        return self.ranks // (self.tensor * self.pipeline)

    def __str__(self) -> str:
        sizes = {"TP": self.tensor, "PP": self.pipeline, "VPP": self.virtual, "EP": self.expert, "DP": self.data}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1 or name in ("TP", "PP", "DP")]
        parts += [f"ETP{self.expert_tensor}"] if self.expert_tensor else []
        return "-".join([*parts, *(["buckets"] if self.bucket_size else [])])


@dataclass(frozen=True)
class Source:
    """A job that saves.

    `targets`: how many of the model's targets are filled from each of its checkpoints, and `at_most` in a full run; all
    by default.
    `is_shifted`: releases 0.15 to 0.19 write its fully_reshardable state wrong, because a bucket before the last has
    padding at its end; elements are lost, so it is refused and no target is filled from it.
    """

    layout: Layout
    model: tuple[bool, bool] = DENSE
    distributed: bool = True
    targets: int = 1
    at_most: int = 99
    is_shifted: bool = False

    def __str__(self) -> str:
        return f"{_MODEL_NAMES[self.model]}-{self.layout}{'' if self.distributed else '-plain'}"

    def formats(self, version: str) -> list[str]:
        return [name for name in FORMATS[version] if (name == PLAIN) != self.distributed]


SOURCES = [
    Source(Layout(8, tensor=2, pipeline=2)),
    Source(Layout(4, pipeline=2, virtual=2), at_most=2),
    Source(Layout(4, tensor=2, bucket_size=6000), at_most=2),
    # Three data-parallel ranks are where the packing rules of 0.12 and 0.13 differ.
    Source(Layout(6, pipeline=2), TIED, is_shifted=True),
    Source(Layout(2), TIED, at_most=2),
    Source(Layout(4, pipeline=2, expert=2), EXPERTS),
    Source(Layout(8, tensor=2, pipeline=2, expert=2), EXPERTS, at_most=2),
    Source(Layout(4, expert=2, bucket_size=6000), EXPERTS, at_most=2),
    Source(Layout(4, tensor=2, pipeline=2), distributed=False, targets=4),
    Source(Layout(4, pipeline=2, expert=2), EXPERTS, distributed=False, targets=2, at_most=2),
]
# A full run makes the table of docs/reference/versions.md; the test command takes turns at it.
IS_FULL = bool(os.environ.get("UPDATE_MATRIX"))
TARGETS = {
    DENSE: [
        Layout(4, tensor=4), Layout(4, pipeline=4), Layout(4, tensor=2, bucket_size=6000), Layout(2, tensor=2),
        Layout(4, pipeline=2, virtual=2), Layout(6, pipeline=2),
    ],
    TIED: [Layout(4, tensor=2, pipeline=2), Layout(4, pipeline=4), Layout(2), Layout(4, pipeline=2, virtual=2)],
    EXPERTS: [
        Layout(4, tensor=2, expert=2), Layout(4, expert=4), Layout(4, pipeline=2),
        Layout(4, pipeline=2, expert=2, bucket_size=6000), Layout(8, tensor=2, pipeline=2, expert=2),
        Layout(4, tensor=2, expert=2, expert_tensor=1),
    ],
}  # fmt: skip


def targets_of(source: Source, name: str) -> list[Layout]:
    """The layouts that are filled from one checkpoint: others for the model's next source, and for its next format."""
    if name == FULLY_RESHARDABLE and source.is_shifted:
        return []
    targets = TARGETS[source.model]
    if IS_FULL:
        return targets[: source.at_most]
    siblings = [other for other in SOURCES if (other.model, other.distributed) == (source.model, source.distributed)]
    first = 2 * siblings.index(source) + _NAMES.index(name)
    return [targets[number % len(targets)] for number in range(first, first + source.targets)]


def checkpoint_of(folder: Path, source: Source, name: str) -> Path:
    """Where the run of a release saved."""
    return folder / str(source) / name / "iter_0000004"


def truth_of(folder: Path, source: Source) -> Path:
    """The dump of what was alive when a source saved."""
    return folder / str(source) / "truth"


def dump_of(folder: Path, source: Source, name: str, target: Layout) -> Path:
    """The dump of what was alive after a target was filled."""
    return folder / str(source) / name / str(target)


def _order(version: str, folder: Path) -> dict[str, object]:
    saves = [(source.layout.ranks, _saving(version, folder, source)) for source in SOURCES]
    loads = [
        (target.ranks, loading)
        for model, targets in TARGETS.items()
        for target in targets
        if (loading := _loading(version, folder, model, target))["checkpoints"]
    ]
    ranks = sorted({ranks for ranks, _ in (*saves, *loads)})
    steps = [
        {"ranks": count, action: [order for own, order in orders if own == count]}
        for action, orders in (("save", saves), ("load", loads))
        for count in ranks
    ]
    return {"version": [int(part) for part in version.split(".")[:2]], "steps": steps}


def _saving(version: str, folder: Path, source: Source) -> dict[str, object]:
    experts, tied = source.model
    return {
        "layout": _sizes(source.layout), "experts": experts, "tied": tied, "distributed": source.distributed,
        "truth": str(truth_of(folder, source)),
        "checkpoints": {name: str(checkpoint_of(folder, source, name)) for name in source.formats(version)},
    }  # fmt: skip


def _loading(version: str, folder: Path, model: tuple[bool, bool], target: Layout) -> dict[str, object]:
    experts, tied = model
    checkpoints = [
        [str(checkpoint_of(folder, source, name)), str(dump_of(folder, source, name, target))]
        for source, name in checkpoints_of(version)
        if source.model == model and target in targets_of(source, name)
    ]
    return {"layout": _sizes(target), "experts": experts, "tied": tied, "checkpoints": checkpoints}


def _sizes(layout: Layout) -> dict[str, object]:
    return {name: value for name, value in asdict(layout).items() if name != "ranks"}


def checkpoints_of(version: str) -> Iterator[tuple[Source, str]]:
    """Every source with every format that it is saved in."""
    for source in SOURCES:
        for name in source.formats(version):
            yield source, name


@cache
def wheel(version: str) -> Path | None:
    """The folder of a release, installed from PyPI by name beside the environment; None for the installed one."""
    if not WHEELS[version]:
        return None
    options = ("--only-binary=:all:", "--python-version", WHEELS[version])
    return installed_beside("megatron-core", version, *options)


def run(version: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Save and resume everything with one release; what it saves and dumps goes to `folder`."""
    order = folder / "order.json"
    order.write_text(json.dumps(_order(version, folder)))
    paths = [wheel(version), ROOT / "scripts", ROOT, ROOT / "tests" / "harness" / "ranks"]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path), "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, str(_RANKS_FOLDER / "core_job.py"), str(order)],
        env=environment, capture_output=True, text=True, timeout=_TIME_LIMIT, check=False,
    )  # fmt: skip
    (folder / "log").write_text(result.stdout + result.stderr)
    return result
