"""CONTRIBUTING.md and SECURITY.md name files and folders that exist, and CONTRIBUTING.md lists the whole package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "mcore_ckpt_ext"
# Where a path may begin: a page names files from here on, or within the folder that it speaks of.
ROOTS = (
    REPOSITORY, PACKAGE, PACKAGE / "megatron", PACKAGE / "megatron" / "live",
    PACKAGE / "megatron" / "live" / "optimizer_adapters", PACKAGE / "formats", PACKAGE / "optimizers", PACKAGE / "job",
    REPOSITORY / "tests", REPOSITORY / "tests" / "harness", REPOSITORY / "tests" / "jobs",
    REPOSITORY / "tests" / "operations", REPOSITORY / "scripts", REPOSITORY / "scripts" / "documentation",
)  # fmt: skip
# A file that the page tells its reader to make.
OF_THE_READER = {"parrot.py"}
_PATH = re.compile(r"(?<![\w./*<-])((?:\w+/)*\w+\.py|(?:\w+/)+)(?![\w*<])")


def paths_in(text: str) -> set[str]:
    """The Python files and folders that a page names."""
    return set(_PATH.findall(re.sub(r"https?://\S+|\]\([^)]*\)", "", text)))


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_named_files_exist(page: str) -> None:
    named = paths_in((REPOSITORY / page).read_text()) - OF_THE_READER
    assert len(named) > 4
    missing = {path for path in named if not any((root / path).exists() for root in ROOTS)}
    assert missing == set()


def test_the_whole_package_is_listed() -> None:
    listed = paths_in((REPOSITORY / "CONTRIBUTING.md").read_text())
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert (folders | modules) - listed == set()


def test_a_name_that_is_missing_is_found() -> None:
    assert paths_in("see `layout/none.py`, old/ and `tests/<folder>`") == {"layout/none.py", "old/"}
