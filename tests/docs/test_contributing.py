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


def layer_of(named: str) -> float:
    """Return the number of a module's layer in the contract of import-linter, from the command line downwards."""
    project = (REPOSITORY / "pyproject.toml").read_text()
    contract = project.partition('name = "layers"')[2].partition("exhaustive")[0]
    layers = [re.findall(r"\((\w+)\)", line) for line in contract.splitlines() if line.startswith('    "')]
    number = {name: float(place) for place, names in enumerate(layers) for name in names}
    *folders, module = named.removeprefix("mcore_ckpt_ext/").strip("/").removesuffix(".py").split("/")
    if not folders and module not in number:  # a module of Megatron's part
        folders = ["megatron"]
    if "live" in folders or folders == ["megatron"]:  # below and above it, by the contract about a resume
        return number["optimizer_reshard"] + (0.5 if "live" in folders else -0.5)
    return number[(folders or [module])[0]]


def climbs(section: str) -> list[str]:
    """Return the steps of a path that lead from a module into one of a higher layer."""
    above: list[tuple[int, str]] = []
    found = []
    for line in section.splitlines():
        step = re.split(r"\s{3,}", line.strip())[0]
        indent = len(line) - len(line.lstrip())
        named = _PATH.findall(step)
        above = [(depth, module) for depth, module in above if depth < indent]
        if not line.startswith("    ") or not named:
            continue
        chain = [*(module for _, module in above[-1:]), *named]
        found += [f"{a} -> {b}" for a, b in zip(chain, chain[1:], strict=False) if layer_of(b) < layer_of(a)]
        above.append((indent, named[0]))
    return found


def test_paths_through_the_code_lead_downwards() -> None:
    _, *sections = (REPOSITORY / "CONTRIBUTING.md").read_text().split(", step by step\n")
    assert len(sections) == 5
    assert [climb for section in sections for climb in climbs(section.partition("\n## ")[0])] == []
    upwards = "    writing.py   text\n       -> operations/block_reader.py"
    assert climbs(upwards) == ["writing.py -> operations/block_reader.py"]


def test_a_name_that_is_missing_is_found() -> None:
    assert paths_in("see `layout/none.py`, old/ and `tests/<folder>`") == {"layout/none.py", "old/"}
    assert [exists(path) for path in ("layout/none.py", "old/", "layout/sidecar.py", "docs/")] == [
        False,
        False,
        True,
        True,
    ]
