"""Test what readers of all formats have in common."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path

import pytest
import torch

import mcore_ckpt_ext
from mcore_ckpt_ext import open_checkpoint
from mcore_ckpt_ext.formats.canonical.reader import CanonicalCheckpoint
from mcore_ckpt_ext.formats.parts import Job
from mcore_ckpt_ext.formats.reader import FormatReader
from mcore_ckpt_ext.formats.view import CheckpointView
from tests.harness.checkpoints import fixture_named

PARTS = {field.name for field in fields(CheckpointView)} - {"composition"}


class Replaced(CanonicalCheckpoint):
    """A format that knows another fact than the one that it derives from, as a package of one's own may add it."""

    @cached_property
    def job(self) -> Job:
        return replace(super().job, vocabulary=lambda: 7)


def test_a_reader_returns_parts() -> None:
    """What a format knows is a field of a part, not a member of the readers as well."""
    members = {
        name for name in (*vars(FormatReader), *FormatReader.__annotations__) if not name.startswith(("__", "_abc"))
    }
    assert members >= PARTS
    assert len(members | {"folder", "options", "folder_index"}) <= 15


def test_a_part_that_a_reader_overrides_is_that_of_the_view(tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(fixture_named("p01").run, tmp_path / "out", mcore_ckpt_ext.Canonical())
    own, replaced = (kind(tmp_path / "out").view for kind in (CanonicalCheckpoint, Replaced))
    assert (own.job.vocabulary(), replaced.job.vocabulary()) == (None, 7)
    assert replaced.job.tokens == 7
    assert replaced.job.layout == own.job.layout


def takes_reader(source: str) -> bool:
    """Whether a source takes the reader of an open checkpoint."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == "reader" and ast.unparse(node.value).endswith("format")
        for node in ast.walk(ast.parse(source))
    )


def test_only_formats_take_the_reader_of_a_checkpoint() -> None:
    package = Path(mcore_ckpt_ext.__file__).parent
    takers = {path.relative_to(package).parts[0] for path in package.rglob("*.py") if takes_reader(path.read_text())}
    assert takers == {"formats"}


@pytest.mark.parametrize("name", ["p01", "p08", "p31", "p50"])
def test_default_of_a_field_is_its_value_for_a_format_without_it(name: str) -> None:
    checkpoint = open_checkpoint(fixture_named(name).run)
    has_index = name != "p08"
    assert (checkpoint.files.index() is not None, checkpoint.files.stored_index() is not None) == (has_index, has_index)
    assert (checkpoint.model.fit(), checkpoint.format.run_config(), checkpoint.job.vocabulary()) == (None, None, None)
    assert checkpoint.format.loading.by_rank == (name == "p08")


def test_the_folder_has_the_iteration_where_the_common_state_has_none(tmp_path: Path) -> None:
    copy = fixture_named("p05").copy_to(tmp_path / "copy")
    folder = copy.iteration.rename(copy.run / "iter_0000007")
    assert open_checkpoint(folder).job.iteration() == 4
    common = torch.load(folder / "common.pt", weights_only=False)
    del common["iteration"]
    (folder / "common.pt").chmod(0o644)
    torch.save(common, folder / "common.pt")
    assert open_checkpoint(folder).job.iteration() == 7
    assert open_checkpoint(folder.rename(tmp_path / "elsewhere")).job.iteration() == 0
