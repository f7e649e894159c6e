"""Test that the reference is complete: generated parts are current, and written parts name existing code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from documentation import generated  # type: ignore[attr-defined]

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import COMMANDS, DONE, UNEQUAL, UNUSABLE
from mcore_ckpt_ext.families.recognition import FAMILIES
from mcore_ckpt_ext.optimizers.table import FORMATS
from mcore_ckpt_ext.settings import SETTINGS
from mcore_ckpt_ext.targets import TARGETS

REPOSITORY = Path(mcore_ckpt_ext.__file__).parents[1]
DOCS = REPOSITORY / "docs"


def text_of(page: str) -> str:
    return (DOCS / page).read_text()


def test_generated_parts_are_current() -> None:
    """Mended by `python -m scripts.documentation.generated`."""
    pages = {path: path.read_text() for path in DOCS.rglob("*.md")}
    parts = sorted(name for page in pages.values() for name in re.findall("<!-- generated: (.*) -->", page))
    with_name = {"command": list(COMMANDS), "errors": sorted(set(generated.SUBJECTS.values()))}
    assert parts == sorted(
        f"{part} {name}".strip() for part in generated.PARTS for name in with_name.get(part, [""])
    ), "each part is on one page"
    stale = [name for name, page in pages.items() if page != generated.with_parts(page)]
    assert stale == []


def test_the_command_line_has_every_command_and_option() -> None:
    assert re.findall(r"\(commands/(\w+)\.md\)", generated.commands()) == list(COMMANDS)
    text = "".join(map(generated.command, COMMANDS))
    for option in ("`--html FILE`", "`--megatron-version V`", "`--kinds KIND ...`", "`--quick`", "`--save FOLDER`"):
        assert option in text


def test_the_settings_have_a_row_each() -> None:
    assert re.findall(r"^\| \[`(\w+)`", generated.settings(), re.MULTILINE) == [setting.name for setting in SETTINGS]


def test_every_family_has_a_place_in_its_table() -> None:
    """A row without compared logits gives the reason, or the type that computes the same."""
    rows = [row.split(" | ") for row in re.findall(r"^\| (?!models|---)(.*) \|$", generated.families(), re.MULTILINE)]
    named = [name for _, types, _ in rows for name in re.findall(r"`([\w-]+)`", types)]
    assert sorted(named) == sorted(family.model_type for family in FAMILIES)
    for *_, tested in rows:
        assert re.match(r"[TE]P\d|as `|not compared: \w", tested), tested


def test_families_stand_in_the_table_of_their_kind() -> None:
    tables = re.split(r"^### ", generated.families(), flags=re.MULTILINE)[1:]
    groups = {table.partition("\n")[0]: set(re.findall(r"`(\w+)`", table)) for table in tables}
    for title, model_type in (
        ("Dense", "llama"),
        ("Mixture of experts", "mixtral"),
        ("Latent attention", "deepseek_v3"),
        ("Linear attention and Mamba", "qwen3_next"),
        ("Trained by Megatron-Bridge only", "gemma2"),
    ):
        assert model_type in groups[title]


def test_every_public_name_is_in_the_reference() -> None:
    named = re.findall(r"^::: mcore_ckpt_ext\.(\w+)", text_of("reference/python.md"), re.MULTILINE)
    assert sorted(named) == sorted(set(mcore_ckpt_ext.__all__) - {"__version__"})


@pytest.mark.parametrize("name", FORMATS)
def test_every_optimizer_format_is_explained(name: str) -> None:
    assert f"`{name}`" in text_of("reference/formats.md")


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_is_explained(name: str) -> None:
    assert f"| `{name}` |" in text_of("reference/commands/convert.md")


def test_the_exit_codes() -> None:
    rows = re.findall(r"^\| (\d+) \|", text_of("reference/exit-codes.md"), re.MULTILINE)
    assert rows == [str(code) for code in (DONE, UNEQUAL, UNUSABLE, 130)]


def test_every_error_that_is_raised_is_listed() -> None:
    """By another way than the generator's: each class that any `raise` of the package names."""
    raised = {
        node.exc.func.id
        for path in (REPOSITORY / "mcore_ckpt_ext").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    }
    text = "\n".join(map(generated.errors, set(generated.SUBJECTS.values())))
    classes = set(re.findall(r"^## (\w+)", text, re.MULTILINE))
    assert classes == set(re.findall(r"^\| `(\w+)` \|", generated.error_classes(), re.MULTILINE))
    assert classes >= raised & set(mcore_ckpt_ext.__all__)
    assert len(generated.messages()) > 200
    assert "(TP, PP)" not in text, "that one is Megatron's"


def test_a_message_is_read_from_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "errors.py").write_text((REPOSITORY / "mcore_ckpt_ext" / "errors.py").read_text())
    (tmp_path / "one.py").write_text('HOW = "wait"\nraise UsageError(f"no {name} | here", hint=HOW + " a bit")\n')
    monkeypatch.setattr(generated, "PACKAGE", tmp_path)
    assert generated.Message("UsageError", "no … | here", "wait a bit", "commands") in generated.messages()
    assert "| no … \\| here | wait a bit |" in generated.errors("commands")


PAGES = sorted(path for folder in ("docs", "benchmarks", "tests") for path in (REPOSITORY / folder).rglob("*.md"))


@pytest.mark.parametrize("page", [*REPOSITORY.glob("*.md"), *PAGES], ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_can_be_read_at_once(page: Path) -> None:
    assert len(page.read_text().split()) <= 2_000
