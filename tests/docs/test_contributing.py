"""Test that pages for contributors name existing files, and that of the architecture the whole package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "mcore_ckpt_ext"
ARCHITECTURE = "docs/project/architecture.md"
FOLDERS = ("mcore_ckpt_ext", "tests", "scripts", "docs", "patches", "benchmarks")
# A file that the page tells its reader to make.
OF_THE_READER = {"parrot.py"}
_PATH = re.compile(r"(?<![\w./*<-])((?:\w+/)*\w+\.py|(?:\w+/)+)(?![\w*<])")


def paths_in(text: str) -> set[str]:
    """The Python files and folders that a page names."""
    return set(_PATH.findall(re.sub(r"https?://\S+|\]\([^)]*\)", "", text)))


def exists(named: str) -> bool:
    """Whether the path of a file or folder is this one or ends with it: a page names files within a folder."""
    pattern = named.rstrip("/")
    below = (path for folder in FOLDERS for path in (REPOSITORY / folder).rglob(pattern))
    return (REPOSITORY / pattern).exists() or next(below, None) is not None


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", ARCHITECTURE])
def test_named_files_exist(page: str) -> None:
    named = paths_in((REPOSITORY / page).read_text()) - OF_THE_READER
    assert len(named) > 4
    assert {path for path in named if not exists(path)} == set()


def test_the_whole_package_is_listed() -> None:
    listed = paths_in((REPOSITORY / ARCHITECTURE).read_text())
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert (folders | modules) - listed == set()


def test_a_name_that_is_missing_is_found() -> None:
    assert paths_in("see `layout/none.py`, old/ and `tests/<folder>`") == {"layout/none.py", "old/"}
    assert [exists(path) for path in ("layout/none.py", "old/", "layout/sidecar.py", "docs/")] == [
        False,
        False,
        True,
        True,
    ]
