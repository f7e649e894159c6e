"""Test the cells of the workflow's matrix: each names existing tests, and together they cover the promises."""

from __future__ import annotations

import re
from pathlib import Path

import matrix_cell
import tomllib
import yaml
from matrix_cell import Cell, parse_cell

REPOSITORY = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "tests.yml").read_text())
CELLS = [parse_cell(words.split())[0] for words in WORKFLOW["jobs"]["matrix"]["strategy"]["matrix"]["cell"]]


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
    cell, others = parse_cell(["--megatron", "0.18.2", "-x", "tests/jobs/test_resume.py"])
    assert (cell, others) == (Cell(megatron="0.18.2"), ["-x", "tests/jobs/test_resume.py"])
    assert (cell.has_loop, cell.tests) == (True, matrix_cell.LOOP_TESTS)
    assert Cell(megatron="0.16.1").tests == matrix_cell.CORE_TESTS
    assert parse_cell(["--python", "3.10"])[0].tests == matrix_cell.PACKAGE_TESTS
