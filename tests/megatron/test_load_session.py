"""Test that a load, a rehearsal and every command read the index of a checkpoint once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.formats.zarr import reader as zarr
from mcore_ckpt_ext.layout.parameter_order import LOCAL
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.operations.iteration_health import problems_of
from mcore_ckpt_ext.storage import dcp_index
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex
from tests.harness.checkpoints import fixture_named

PACKAGE = Path(mcore_ckpt_ext.__file__).parent


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One item for each time that an index is parsed."""
    times: list[str] = []
    index_of = dcp_index.index_of  # type: ignore[attr-defined]

    def counted(metadata: object) -> DcpIndex:
        times.append("parsed")
        return index_of(metadata)

    monkeypatch.setattr(dcp_index, "index_of", counted)
    return times


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["p10", "p50", "p49"])
@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "{}"],
        ["verify", "{}", "--quick"],
        ["verify", "{}"],
        ["plan", "{}", "--gpus", "4"],
        ["plan", "{}", "--gpus", "2", "--rehearse", "pp=2"],
        ["convert", "{}", "{}/../converted", "--to", "legacy", "--dry-run"],
    ],
    ids=lambda command: " ".join(command),
)
def test_a_command_reads_the_index_once(name: str, command: list[str], parsed: list[str]) -> None:
    main([word.format(fixture_named(name).run) for word in command])
    assert parsed == ["parsed"]


def test_a_comparison_reads_the_index_of_each_side_once(parsed: list[str]) -> None:
    run = str(fixture_named("p50").run)
    assert main(["diff", run, run]) == 0
    assert parsed == ["parsed"] * 2


def test_what_is_opened_within_a_session_shares_its_index(parsed: list[str]) -> None:
    folder = fixture_named("p50").iteration
    session = LoadSession(folder)
    assert session.with_folder(folder / ".." / folder.name) is session
    assert session.checkpoint is session.checkpoint
    assert session.with_orders(()).names("weight") == session.checkpoint.names("weight")
    assert parsed == ["parsed"]


def test_a_load_opens_a_checkpoint_once_and_reads_the_arrays_of_zarr_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    read_index = zarr.read_index

    def counted(folder: Path) -> DcpIndex:
        read.append(folder)
        return read_index(folder)

    monkeypatch.setattr(zarr, "read_index", counted)
    session = LoadSession(fixture_named("p31").iteration)
    assert problems_of(session.folder, session.index) == ()
    assert session.checkpoint is session.checkpoint
    assert session.with_orders([LOCAL]) is not session.checkpoint
    assert read == [session.folder]


def calls(name: str, *folders: str) -> Iterator[str]:
    """Yield the places in some folders of the package that call a function, or name it to another one."""
    for folder in folders:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Name) and node.id == name:
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}"


def test_few_places_open_a_checkpoint_for_a_job() -> None:
    assert len(list(calls("open_checkpoint", "megatron", "rehearsal"))) <= 5


def test_no_context_variable_carries_an_index() -> None:
    assert not list(calls("ContextVar", "storage", "megatron", "rehearsal", "formats"))
