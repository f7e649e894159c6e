"""Test the cells of the workflow's matrix: each names existing tests, and together they cover the promises."""

from __future__ import annotations

import re
from pathlib import Path

import matrix_cell
import pytest
import run_tests
import tomllib
import yaml
from matrix_cell import Cell, cell_of

REPOSITORY = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "tests.yml").read_text())
CELLS = [cell_of(run_tests.parsed(words.split())) for words in WORKFLOW["jobs"]["matrix"]["strategy"]["matrix"]["cell"]]


def test_every_cell_names_tests_that_exist() -> None:
    for cell in CELLS:
        assert cell != Cell()
        assert [name for name in cell.tests if not (REPOSITORY / name).exists()] == []


def test_every_release_of_megatron_has_a_cell() -> None:
    """Those of the documentation's table; the one of the extra `demo` is that of all other tests."""
    table = (REPOSITORY / "docs" / "reference" / "versions.md").read_text()
    installed = re.search(r"megatron-core==([\d.]+)", (REPOSITORY / "pyproject.toml").read_text())
    documented = set(re.findall(r"^\| (\d+\.\d+\.\d+) \|", table, re.MULTILINE))
    assert documented - {installed[1]} <= {cell.megatron for cell in CELLS if cell.megatron}


def test_every_python_of_the_metadata_has_a_cell() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert {".".join(map(str, cell.python)) for cell in CELLS if cell.python} == set(named)
    oldest = re.search(r"torch>=([\d.]+)", " ".join(project["dependencies"]))
    assert any(cell.torch.startswith(oldest[1]) for cell in CELLS if cell.torch)


def test_tests_of_a_cell() -> None:
    requested = run_tests.parsed(["--megatron", "0.18.2", "tests/jobs/test_resume.py", "--", "-x", "-k", "a or b"])
    assert (requested.tests, requested.options) == (["tests/jobs/test_resume.py"], ["-x", "-k", "a or b"])
    cell = cell_of(requested)
    assert cell == Cell(megatron="0.18.2")
    assert (cell.has_loop, cell.tests) == (True, matrix_cell.LOOP_TESTS)
    assert Cell(megatron="0.16.1").tests == matrix_cell.CORE_TESTS
    assert cell_of(run_tests.parsed(["--python", "3.10"])).tests == matrix_cell.PACKAGE_TESTS


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--qick"], "unrecognized arguments: --qick"),
        (["tests/of_nothing"], "there is no tests/of_nothing"),
        (["--python", "newest"], "'newest' is not a version, such as 3.10"),
        (["--quick", "tests/storage"], "tests are named, or chosen by --quick or --changed"),
        (["--quick", "--changed"], "not allowed with argument --quick"),
    ],
)
def test_a_mistaken_command_ends_before_anything_is_installed(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_tests.main(words)
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_tests.main(["--help"])
    assert ended.value.code == 0
    assert "PYTEST-OPTION" in capsys.readouterr().out
