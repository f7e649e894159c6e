"""Test the table of differences between releases of Megatron."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext import open_checkpoint
from mcore_ckpt_ext.job import releases
from mcore_ckpt_ext.job.arguments.table import ROWS as ROWS_OF_ARGUMENTS
from mcore_ckpt_ext.job.releases import Capability
from mcore_ckpt_ext.versions import KNOWN, OLDEST, Version
from tests.harness.checkpoints import RELEASES, fixture_named

HEAD = Version(0, 20)  # as the development head calls itself
TORCH = [Version(2, minor) for minor in range(3, 14)]
ROWS = {name: row for name, row in vars(releases).items() if isinstance(row, Capability)}
SHOWN = {name: row for name, row in ROWS.items() if row.shown_by}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_divides_the_releases(name: str) -> None:
    row = ROWS[name]
    others = TORCH if name.startswith("TORCH_") else (*KNOWN, Version(1, 0)) if row.since == OLDEST else ()
    assert {row.is_of(version) for version in others or (*KNOWN, HEAD)} == {True, False}
    assert row.what
    assert "/" in row.source


def test_first_and_last() -> None:
    row = releases.LOADS_MODEL_SPACE
    assert [version.minor for version in KNOWN if row.is_of(version)] == [14, 15]
    assert [version.minor for version in KNOWN if releases.LOADS_BUCKET_SPACE.is_of(version)] == list(range(7, 13))


@pytest.mark.parametrize("fixture", RELEASES)
@pytest.mark.parametrize("name", SHOWN)
def test_releases_inferred_from_an_argument_are_right(name: str, fixture: str) -> None:
    arguments = open_checkpoint(fixture_named(fixture).run).job.arguments()
    assert SHOWN[name].is_shown_by(arguments) == SHOWN[name].is_of(RELEASES[fixture])


def test_who_splits_a_layer_wise_optimizer() -> None:
    assert [version.minor for version in (*KNOWN, HEAD) if releases.splits_layer_wise(version)] == [18, 20]


def test_releases_that_no_argument_shows() -> None:
    with pytest.raises(ValueError, match="no argument shows whether Megatron loads"):
        releases.LOADS_DP_RESHARDABLE.is_shown_by(open_checkpoint(fixture_named("p01").run).job.arguments())


def test_a_range_of_releases() -> None:
    assert releases.releases_between(Version(0, 15), Version(0, 17)) == [Version(0, minor) for minor in (15, 16, 17)]
    assert releases.releases_between(Version(0, 18)) == [Version(0, 18), Version(0, 19)]
    assert releases.releases_between(Version(0, 17), Version(0, 15)) == []


def test_each_release_but_the_oldest_has_an_argument() -> None:
    assert len(releases.FIRST_ARGUMENTS) == len(KNOWN) - 1
    for name, release in zip(releases.FIRST_ARGUMENTS, KNOWN[1:], strict=True):
        assert name not in ROWS_OF_ARGUMENTS or ROWS_OF_ARGUMENTS[name].releases[0] == release


@pytest.mark.parametrize("fixture", RELEASES)
def test_arguments_place_a_job_between_releases(fixture: str) -> None:
    first, last = releases.releases_by_arguments(open_checkpoint(fixture_named(fixture).run).job.arguments())
    assert (first[0] if first else OLDEST) == RELEASES[fixture] == (last[0] if last else KNOWN[-1])


def test_the_releases_that_do_something_and_those_that_do_not() -> None:
    assert releases.LOADS_MODEL_SPACE.span == (Version(0, 14), Version(0, 15))
    assert releases.LOADS_ZARR.span == (None, Version(0, 15))
    assert releases.LOADS_ZARR.span_without == (Version(0, 16), None)
    assert releases.DESCRIBES_CONTENT.span_without == (None, Version(0, 12))
    with pytest.raises(ValueError, match="before and after"):
        _ = releases.LOADS_MODEL_SPACE.span_without
