"""Test the genuine DistributedOptimizer of six releases: checkpoints are equal, read offline or into live ranks.

One program for each release (`ranks/core_job.py`) saves every format that the release can write from several sources,
then builds target layouts of the same release and fills them from the checkpoints. The matrix in
docs/reference/versions.md is made from a full run, with UPDATE_MATRIX=1 and TEST_RELEASES=all (twenty minutes);
otherwise each checkpoint fills one of the layouts in turn, and the matrix must list at least the equal ones. Without
TEST_RELEASES two of the releases run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_on_cpu import dump_optimizer

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import ModelMismatchError
from tests.jobs.versions.jobs import (
    FORMATS,
    FULLY_RESHARDABLE,
    IS_FULL,
    RELEASES,
    ROOT,
    SOURCES,
    Source,
    checkpoint_of,
    checkpoints_of,
    dump_of,
    run,
    targets_of,
    truth_of,
)
from tests.jobs.versions.matrix import BEGIN, END, Shown, version_of

pytestmark = pytest.mark.nightly

SETTINGS = ("lr", "weight_decay", "wd_mult", "step", "betas", "eps")


@dataclass(frozen=True)
class Dump:
    """What was alive on all ranks of a job: the tensors, and what the optimizer applies to each parameter."""

    folder: Path

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return dump_optimizer.assemble(self.folder)

    @cached_property
    def settings(self) -> dict[str, dict[str, Any]]:
        groups = dump_optimizer.parameter_settings(self.folder)
        return {name: {key: group[key] for key in SETTINGS} for name, group in groups.items()}


@pytest.mark.parametrize("version", RELEASES)
def test_every_format_is_read_back_equal_offline_and_live(version: str, tmp_path: Path) -> None:
    result = run(version, tmp_path)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert f"megatron-core {version}\n" in result.stdout
    found = {name: Shown() for name in FORMATS[version]}
    truths = {source: Dump(truth_of(tmp_path, source)) for source in SOURCES}
    for source, name in checkpoints_of(version):
        truth = truths[source]
        if is_equal_offline(checkpoint_of(tmp_path, source, name), source, name, truth):
            found[name].offline.add(str(source))
        for target in targets_of(source, name):
            live = Dump(dump_of(tmp_path, source, name, target))
            assert live.tensors.keys() == truth.tensors.keys(), live
            assert [key for key in truth.tensors if not torch.equal(live.tensors[key], truth.tensors[key])] == [], live
            assert live.settings == truth.settings, live
            found[name].add(source, target)
    few = {name: one.targets for name, one in found.items() if len(one.targets) < 6}
    assert not few
    assert_matrix_says([one.row(version, name) for name, one in found.items()], version)


def is_equal_offline(folder: Path, source: Source, name: str, truth: Dump) -> bool:
    """Every tensor without Megatron, bit for bit; False where Megatron itself lost elements, which are refused."""
    checkpoint = mcore_ckpt_ext.open_checkpoint(folder)
    assert checkpoint.optimizer.format() == name
    assert {f"{kind}.{key}" for kind in checkpoint.kinds() for key in checkpoint.names(kind)} == truth.tensors.keys()
    refused = set()
    for key, expected in truth.tensors.items():
        kind, _, parameter = key.partition(".")
        try:
            assert torch.equal(checkpoint.tensor(kind, parameter).read(), expected), (folder, key)
        except ModelMismatchError:
            refused.add(parameter)
    # By the packing rule of that version: the search by content would hide a wrong one.
    assert "discovery by content" not in checkpoint.optimizer.state().order_sources(), folder
    assert refused == set(checkpoint.optimizer.state().lost_elements())
    assert bool(refused) == (source.is_shifted and name == FULLY_RESHARDABLE), folder
    return not refused


def assert_matrix_says(rows: list[str], version: str) -> None:
    """The matrix has these rows of a release, or more in them; after a full run it gets exactly these."""
    path = ROOT / "docs" / "reference" / "versions.md"
    before, _, rest = path.read_text().partition(BEGIN)
    text, _, after = rest.partition(END)
    release = tuple(int(part) for part in version.split("."))
    head, line, *said = text.strip().splitlines()
    if IS_FULL:
        said = sorted([*(row for row in said if version_of(row) != release), *rows], key=version_of)
        path.write_text(f"{before}{BEGIN}\n\n" + "\n".join([head, line, *said]) + f"\n\n{END}{after}")
    of_release = [row for row in said if version_of(row) == release]
    for row, full in zip(map(cells_of, rows), map(cells_of, of_release), strict=True):
        assert row[:3] == full[:3]  # release, format, and all that can be read offline
        assert all(int(count or 0) <= int(most or 0) for count, most in zip(row[3:], full[3:], strict=True)), row


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]
