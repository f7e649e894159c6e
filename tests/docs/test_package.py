"""Test the published packages: the wheel's content and metadata, and the tests in the source archive."""

from __future__ import annotations

import email.message
import email.parser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import COMMANDS
from tests.harness.checkpoints import FOLDER_VARIABLE

pytestmark = pytest.mark.thorough

REPOSITORY = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
# What the test command and Python itself leave in the folder.
IGNORED = shutil.ignore_patterns(
    ".git", ".venv*", "*cache*", ".hypothesis", "*.egg-info", "build", "dist", "demo", "__pycache__"
)
PAGES = (
    "page.html",
    "style.css",
    "shared.js",
    "inspection.js",
    "comparison.js",
    "plan.js",
    "rehearsal.js",
    "verification.js",
)
SCHEMAS = tuple(f"{command}.json" for command in COMMANDS)
OTHER_THAN_CODE = {
    "mcore_ckpt_ext/py.typed",
    "mcore_ckpt_ext/families/checked.json",
    "mcore_ckpt_ext/families/config_reads.json",
    *(f"mcore_ckpt_ext/cli/pages/{name}" for name in PAGES),
    *(f"mcore_ckpt_ext/cli/schemas/{name}" for name in SCHEMAS),
    "mcore_ckpt_ext/selftest/eight_ranks.tar.xz",
}
# Cheap, and each looks at the files beside it: data, documentation, scripts, the package itself.
TESTS_OF_THE_ARCHIVE = (
    "tests/test_settings.py",
    "tests/docs/test_reference.py",
    "tests/cli/test_page.py::test_nothing_is_loaded_from_other_sites",
)


def built(kind: str, source: Path, folder: Path) -> Path:
    """A wheel or a source archive, by setuptools itself."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)],
        cwd=source, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, unpacked."""
    source, folder = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("archive")
    shutil.copytree(REPOSITORY, source, ignore=IGNORED)
    with tarfile.open(built("sdist", source, folder)) as packed:
        packed.extractall(folder, filter="data")
    shutil.rmtree(source)
    return folder / f"mcore_ckpt_ext-{mcore_ckpt_ext.__version__}"


@pytest.fixture(scope="module")
def wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from the source archive as pip builds it."""
    copy = tmp_path_factory.mktemp("copy") / "tree"
    shutil.copytree(archive, copy)
    return zipfile.ZipFile(built("wheel", copy, tmp_path_factory.mktemp("wheel")))


def metadata_of(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.parser.Parser().parsestr(wheel.read(name).decode())


def test_the_archive_is_the_repository(archive: Path) -> None:
    listed = {str(path.relative_to(archive)) for path in archive.rglob("*") if path.is_file()}
    made = {name for name in listed if name.startswith("mcore_ckpt_ext.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    known = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if known.returncode:
        pytest.skip("not a clone: what belongs to the repository is not known")
    present = {name for name in known.stdout.splitlines() if (REPOSITORY / name).exists()}
    assert present - listed == set()
    assert {name for name in listed - made - present if not (REPOSITORY / name).exists()} == set()


@pytest.mark.nightly
def test_its_own_tests_run_from_it(archive: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS_OF_THE_ARCHIVE],
        cwd=archive, env={**os.environ, "PYTHONPATH": str(archive), FOLDER_VARIABLE: str(tmp_path)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"^\d+ passed", done.stdout.splitlines()[-1]), done.stdout[-500:]


def test_the_wheel_has_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    expected = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "mcore_ckpt_ext").rglob("*.py")}
    expected |= OTHER_THAN_CODE | {"mcore_ckpt_ext_autoload.py"}
    about = f"mcore_ckpt_ext-{mcore_ckpt_ext.__version__}.dist-info"
    expected |= {f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt")}
    assert set(wheel.namelist()) == expected | {f"{about}/licenses/LICENSE"}


def test_torch_and_the_shell_find_it(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    text = wheel.read(name).decode()
    assert "[torch.backends]\nmcore_ckpt_ext = mcore_ckpt_ext_autoload:register" in text
    assert "[console_scripts]\nmcore-ckpt = mcore_ckpt_ext.cli.main:run_as_process" in text


def test_the_metadata_are_complete(wheel: zipfile.ZipFile) -> None:
    found = metadata_of(wheel)
    assert found["Version"] == mcore_ckpt_ext.__version__
    assert found["Author"] == "the mcore_ckpt_ext authors"
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Description-Content-Type"] == "text/markdown"
    assert {"Homepage", "Documentation", "Changelog", "Issues"} == {
        url.partition(",")[0] for url in found.get_all("Project-URL", [])
    }
    assert len(found.get_all("Classifier", [])) > 5
    extras = set(found.get_all("Provides-Extra", []))
    assert extras == {"completion", "demo", "docs", "megatron-dependencies", "remote", "test"}
    needed = [line for line in found.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(re.split(r"[<>=]", line)[0] for line in needed) == [
        "isal",
        "numpy",
        "pyyaml",
        "regex",
        "torch",
        "typing-extensions",
    ]


def test_the_readme_holds_outside_of_the_repository(wheel: zipfile.ZipFile) -> None:
    text = str(metadata_of(wheel).get_payload())
    assert "pip install" in text
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https://")] == []
    assert "<!--" not in text


def test_the_version_is_said_once_more_where_others_look() -> None:
    version = mcore_ckpt_ext.__version__
    assert f"\nversion: {version}\n" in (REPOSITORY / "CITATION.cff").read_text()
    assert f"\n## [{version}] - " in (REPOSITORY / "CHANGELOG.md").read_text()


def test_the_workflow_runs_exactly_the_test_command() -> None:
    text = (REPOSITORY / ".github" / "workflows" / "tests.yml").read_text()
    cell = "python3 scripts/run_tests.py ${{ matrix.cell }}"
    assert re.findall(r"^ *- run: (.*)$", text, re.MULTILINE) == [".ci/run", cell]
