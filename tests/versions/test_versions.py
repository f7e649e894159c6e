"""The genuine DistributedOptimizer of six releases: what each writes is read back equal, offline and into live ranks.

One program a release (`ranks/core_job.py`): it saves every format that the release can write from several sources, then
builds target layouts of the same release and fills each from every checkpoint. The matrix in the README is made of what
was equal in this run: UPDATE_README=1 writes it, otherwise it must say exactly that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt_ext

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from megatron_on_cpu import dump_optimizer

ROOT = Path(__file__).parents[2]
RANKS_FOLDER = Path(__file__).parent / "ranks"
RANKS = 4
TIME_LIMIT = 240
INSTALLED = "0.19.2"
# Release: the Python that its wheel on PyPI was made for. What is compiled in it is not used here.
WHEELS = {"0.12.3": "3.11", "0.13.1": "3.11", "0.14.0": "3.12", "0.15.3": "3.12", "0.16.1": "3.12", INSTALLED: ""}
DP_RESHARDABLE, FULLY_RESHARDABLE = "dp_reshardable", "fully_reshardable"
MODEL_SPACE, DP_ZERO = "fully_sharded_model_space", "dp_zero_gather_scatter"
LEGACY, PLAIN = "legacy_torch", "legacy_torch_per_parameter"
_OLD, _NEW = (MODEL_SPACE, DP_ZERO), (DP_RESHARDABLE, FULLY_RESHARDABLE)
FORMATS = {
    "0.12.3": (*_OLD, LEGACY, PLAIN), "0.13.1": (*_OLD, LEGACY, PLAIN), "0.14.0": (*_OLD, LEGACY, PLAIN),
    "0.15.3": (*_NEW, *_OLD, LEGACY, PLAIN), "0.16.1": (*_NEW, LEGACY, PLAIN), INSTALLED: (*_NEW, LEGACY, PLAIN),
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """As `core_model.Layout`, with the model that it is for."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    bucket_size: int | None = None

    @property
    def data(self) -> int:
        return RANKS // (self.tensor * self.pipeline)

    def __str__(self) -> str:
        names = {"TP": self.tensor, "PP": self.pipeline, "VPP": self.virtual, "EP": self.expert}
        parts = [f"{name}{size}" for name, size in names.items() if size > 1 or name in ("TP", "PP")]
        return "-".join([*parts, *(["buckets"] if self.bucket_size else [])])


@dataclass(frozen=True)
class Source:
    """A job that saves; `spared` names formats that it does not write, and why is said beside it.

    `targets`: how many of the model's targets are filled from it.
    """

    layout: Layout
    experts: bool = False
    tied: bool = False
    distributed: bool = True
    spared: tuple[str, ...] = ()
    targets: int = 6

    @property
    def model(self) -> tuple[bool, bool]:
        return self.experts, self.tied

    def __str__(self) -> str:
        kind = "experts" if self.experts else "tied" if self.tied else "dense"
        return f"{kind}-{self.layout}{'' if self.distributed else '-plain'}"


# Releases 0.15 to 0.19 write fully_reshardable wrong when a bucket before the last has padding at its end: the tied
# embedding's own bucket, and several buckets. The package refuses or repairs that (tests/test_fixtures.py).
_CORRUPTED = (FULLY_RESHARDABLE,)
SOURCES = [
    Source(Layout(tensor=2, pipeline=2)),
    Source(Layout(pipeline=4), tied=True, spared=_CORRUPTED),
    Source(Layout(pipeline=2, virtual=2), targets=1),
    Source(Layout(tensor=2, bucket_size=6000), spared=_CORRUPTED, targets=1),
    Source(Layout(pipeline=2, expert=2), experts=True),
    Source(Layout(tensor=2, expert=2), experts=True, targets=2),
    Source(Layout(tensor=2, pipeline=2), distributed=False),
]
TARGETS = {
    (False, False): [
        Layout(), Layout(pipeline=4), Layout(tensor=4), Layout(pipeline=2), Layout(pipeline=2, virtual=2),
        Layout(tensor=2, bucket_size=6000),
    ],
    (False, True): [Layout(tensor=2, pipeline=2), Layout(tensor=4)],
    (True, False): [Layout(expert=4), Layout(pipeline=2), Layout(tensor=2, expert=2), Layout(pipeline=2, expert=2)],
}  # fmt: skip
DIMENSIONS = ("TP", "PP", "VPP", "DP", "EP", "several buckets")


@dataclass
class Shown:
    """What was equal for one release and format."""

    offline: int = 0
    targets: set[str] = field(default_factory=set)
    dimensions: set[str] = field(default_factory=set)


SHOWN: dict[str, dict[str, Shown]] = {}


def formats_of(version: str, source: Source) -> list[str]:
    if not source.distributed:
        return [PLAIN]
    return [name for name in FORMATS[version] if name not in (*source.spared, PLAIN)]


@cache
def wheel(version: str) -> Path | None:
    """The folder of a release, installed from PyPI by name beside the environment; None for the installed one."""
    if not WHEELS[version]:
        return None
    folder = Path(sys.prefix) / "megatron-core" / version
    if not folder.exists():
        partial = folder.with_name(f"{version}.partial-{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", WHEELS[version], "--target", str(partial), f"megatron-core=={version}"]
        subprocess.run(command, check=True, timeout=TIME_LIMIT)
        partial.rename(folder)
    return folder


@pytest.fixture(scope="module", params=list(WHEELS))
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A release, and the folder with all that its run saved and dumped."""
    version: str = request.param
    folder = tmp_path_factory.mktemp(f"megatron-{version}-")
    order = {
        "ranks": RANKS,
        "version": [int(part) for part in version.split(".")[:2]],
        "save": [
            {
                "layout": vars(source.layout), "experts": source.experts, "tied": source.tied,
                "distributed": source.distributed, "folder": str(folder / str(source)),
                "formats": formats_of(version, source),
            }
            for source in SOURCES
        ],
        "load": [
            {
                "layout": vars(target), "experts": experts, "tied": tied,
                "checkpoints": [
                    [str(folder / str(source) / name / "iter_0000004"), str(folder / str(source) / name / str(target))]
                    for source, name in sources_for(version, (experts, tied))
                    if number < source.targets
                ],
            }
            for (experts, tied), targets in TARGETS.items()
            for number, target in enumerate(targets)
        ],
    }  # fmt: skip
    (folder / "order.json").write_text(json.dumps(order))
    paths = [wheel(version), ROOT / "scripts", ROOT, RANKS_FOLDER]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path), "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, str(RANKS_FOLDER / "core_job.py"), str(folder / "order.json")],
        env=environment, capture_output=True, text=True, timeout=TIME_LIMIT, check=False,
    )  # fmt: skip
    (folder / "log").write_text(result.stdout + result.stderr)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert f"megatron-core {version}" in result.stdout
    return version, folder


def sources_for(version: str, model: tuple[bool, bool]) -> Iterator[tuple[Source, str]]:
    for source in SOURCES:
        if source.model == model:
            for name in formats_of(version, source):
                yield source, name


def assert_equal(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor], what: str) -> None:
    """Bit for bit, every kind and tensor."""
    assert found.keys() == truth.keys(), what
    assert [key for key, value in truth.items() if not torch.equal(found[key], value)] == [], what


def test_every_format_is_read_back_equal_offline_and_live(release: tuple[str, Path]) -> None:
    version, folder = release
    for model, targets in TARGETS.items():
        for source, name in sources_for(version, model):
            checkpoint = mcore_ckpt_ext.open_checkpoint(folder / str(source) / name / "iter_0000004")
            assert checkpoint.optimizer_format == name
            truth = dump_optimizer.assemble(folder / str(source) / "truth")
            shown = SHOWN.setdefault(version, {}).setdefault(name, Shown())
            read = {
                f"{kind}.{key}": checkpoint.tensor(kind, key).read()
                for kind in checkpoint.kinds()
                for key in checkpoint.names(kind)
            }
            assert_equal(read, truth, f"{version} {source} {name}, offline")
            shown.offline += 1
            for target in targets[: source.targets]:
                live = dump_optimizer.assemble(folder / str(source) / name / str(target))
                assert_equal(live, truth, f"{version} {source} {name} as {target}")
                shown.targets.add(str(target))
                shown.dimensions |= changed(source.layout, target)
    assert all(len(shown.targets) >= 6 for shown in SHOWN[version].values())


def changed(source: Layout, target: Layout) -> set[str]:
    """The dimensions that differ between two layouts, and whether some buffer had several buckets."""
    pairs = {
        "TP": (source.tensor, target.tensor), "PP": (source.pipeline, target.pipeline),
        "VPP": (source.virtual, target.virtual), "DP": (source.data, target.data),
        "EP": (source.expert, target.expert), "several buckets": (source.bucket_size, target.bucket_size),
    }  # fmt: skip
    return {name for name, (one, other) in pairs.items() if one != other}


BEGIN, END = "<!-- matrix: made by tests/versions -->", "<!-- end of matrix -->"


def matrix() -> str:
    """The table of what was shown, row by row."""
    head = ["Megatron", "format", "offline", "target layouts", *DIMENSIONS]
    rows = [head, ["---"] * len(head)]
    for version, formats in SHOWN.items():
        for name, shown in formats.items():
            cells: list[Any] = [version, f"`{name}`", "equal" if shown.offline else "", len(shown.targets)]
            rows.append([*map(str, cells), *("yes" if name in shown.dimensions else "" for name in DIMENSIONS)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_readme_says_what_was_shown() -> None:
    """Runs after the releases, whose results it needs."""
    if list(SHOWN) != list(WHEELS):
        pytest.skip("not all releases were run")
    path = ROOT / "README.md"
    before, _, rest = path.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    if os.environ.get("UPDATE_README"):
        path.write_text(f"{before}{BEGIN}\n\n{matrix()}\n\n{END}{after}")
    else:
        assert table.strip() == matrix(), "run this folder with UPDATE_README=1, and read what changed"
