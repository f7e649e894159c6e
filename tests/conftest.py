"""The real checkpoints that come with the tests."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_ckpt_ext.model_space.slices import Slice

DATA = Path(__file__).parent / "data"
FIXTURES = sorted(path.name for path in DATA.iterdir() if path.is_dir())
# Written wrong by Megatron itself.
CORRUPTED = [name for name in FIXTURES if "corrupt" in name]
INTACT = [name for name in FIXTURES if name not in CORRUPTED]
# Optimizer formats that need a layout: flat gradient buffers.
FLAT = [name for name in INTACT if any(sign in name for sign in ("dpreshardable", "default", "dpzero", "bucketspace"))]
FLAT += [name for name in INTACT if any(sign in name for sign in ("moe", "torchadam", "te_", "legacy_tp"))]


@dataclass(frozen=True)
class Fixture:
    """A checkpoint written by genuine Megatron, and the truth dumped from the live job beside it."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "ckpt"

    @property
    def iteration(self) -> Path:
        return self.run / "iter_0000004"

    @cached_property
    def truth(self) -> dict[str, torch.Tensor]:
        """Model space: `kind.name` to tensor."""
        return load_file(self.folder / "truth.safetensors")

    @cached_property
    def job(self) -> dict[str, Any]:
        return json.loads((self.folder / "truth.json").read_text())

    def copy_to(self, target: Path) -> Fixture:
        """A copy that a test may damage."""
        shutil.copytree(self.folder, target)
        return Fixture(target)


def fixture_named(prefix: str) -> Fixture:
    """The fixture whose folder name begins with `prefix`."""
    (name,) = (name for name in FIXTURES if name.startswith(prefix))
    return Fixture(DATA / name)


@pytest.fixture(params=INTACT)
def checkpoint_fixture(request: pytest.FixtureRequest) -> Fixture:
    """Each of the intact real checkpoints in turn."""
    return Fixture(DATA / request.param)


@pytest.fixture(params=FLAT)
def flat_fixture(request: pytest.FixtureRequest) -> Fixture:
    """Each of the real checkpoints whose optimizer state lies in flat buffers."""
    return Fixture(DATA / request.param)


@pytest.fixture(params=CORRUPTED)
def corrupted_fixture(request: pytest.FixtureRequest) -> Fixture:
    """Each of the checkpoints that Megatron wrote corrupted."""
    return Fixture(DATA / request.param)


@pytest.fixture
def damaged(tmp_path: Path) -> Fixture:
    """A private copy of p01 (TP1 x PP4 x DP2, tied embeddings) to damage."""
    return fixture_named("p01").copy_to(tmp_path / "p01")


def part_of(tensor: torch.Tensor, part: Slice) -> torch.Tensor:
    """The elements that a slice of one tensor names."""
    windows = [
        tensor[tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))].reshape(-1)
        for region in part.regions
    ]
    return torch.cat(windows)[part.start : part.stop]
