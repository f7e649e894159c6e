"""Test `--json` of every command: it prints one object that follows the published schema, also after errors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documentation.json_schemas import FOLDERS, RESULTS, schema_of, texts

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import COMMANDS, main
from mcore_ckpt_ext.operations.findings import IDS
from tests.harness.checkpoints import Fixture, fixture_named
from tests.harness.colossalai_folders import colossalai_checkpoint
from tests.harness.damage import MATRIX, flip, payload_position
from tests.harness.huggingface import make
from tests.harness.json_schema import violations
from tests.harness.peft import adapter, peft_folder

FIXTURES = sorted(path.name.partition("_")[0] for path in Path(__file__).parents[1].joinpath("data").glob("*.tar.xz"))


def printed(capsys: pytest.CaptureFixture[str], command: str, *words: object) -> dict[str, Any]:
    """The object that a command prints, which is as its schema has it, and as its exit code."""
    code: Any
    try:
        code = main([command, *map(str, words), "--json"])
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr().out
    document = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert out.count("\n") == 1
    assert violations(document, schema_of(command)) == []
    assert list(document)[:5] == ["schema", "command", "ok", "exit_code", "error"]
    assert (document["command"], document["exit_code"], document["ok"]) == (command, code, code == 0)
    assert (document["error"] is None) == (code in (0, 1))
    assert isinstance(document, dict)
    return document


def of(document: dict[str, Any], identifier: str) -> dict[str, Any]:
    (check,) = (check for check in document["checks"] if check["id"] == identifier)
    assert isinstance(check, dict)
    return check


def test_ids_are_unique_and_those_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "json.md").read_text()
    listed = re.findall(r"^\| `([a-z-]+)` \| ", page[page.index("| id | checks |") :], re.MULTILINE)
    assert listed == list(IDS.values())
    assert len(set(listed)) == len(listed)


def test_every_command_has_a_schema() -> None:
    assert RESULTS.keys() == COMMANDS.keys()


def _undescribed(schema: object, path: str = "") -> Iterator[str]:
    """Yield the properties of a schema, and of schemas within it, that have no description."""
    if isinstance(schema, list):
        for item in schema:
            yield from _undescribed(item, path)
    elif isinstance(schema, dict):
        for name, value in schema.get("properties", {}).items():
            if "description" not in value:
                yield f"{path}.{name}"
        for name, value in schema.items():
            yield from _undescribed(value, path if name in ("properties", "anyOf", "items") else f"{path}.{name}")


@pytest.mark.parametrize("command", RESULTS)
def test_each_property_is_described(command: str) -> None:
    assert list(_undescribed(schema_of(command))) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_schemas_are_those_of_the_results(folder: Path) -> None:
    """Otherwise: raise the schema's number if it was released, and python -m scripts.documentation.json_schemas."""
    assert {path.name: path.read_text() for path in folder.iterdir()} == texts()


@pytest.mark.thorough
@pytest.mark.parametrize("name", FIXTURES)
def test_every_fixture(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = fixture_named(name).run
    printed(capsys, "inspect", run)
    found = printed(capsys, "verify", run)
    assert [check["id"] for check in found["checks"]] == list(IDS.values())
    assert found["ok"] == found["sound"]
    printed(capsys, "verify", run, "--quick")
    printed(capsys, "diff", run, run)
    printed(capsys, "convert", run, tmp_path / "out", "--to", "canonical")


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["torch_dist", "legacy", "fsdp_dtensor", "hf", "canonical"])
def test_inspection_of_written_checkpoints(target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = fixture_named("p02").run
    dry = printed(capsys, "convert", run, tmp_path / "out", "--to", target, "--dry-run")
    assert dry["destination"] == str(tmp_path / "out")
    report = printed(capsys, "convert", run, tmp_path / "out", "--to", target)
    assert report["files"] == sum(path.is_file() for path in (tmp_path / "out").rglob("*"))
    printed(capsys, "inspect", tmp_path / "out")
    printed(capsys, "diff", run, tmp_path / "out")
    printed(capsys, "verify", tmp_path / "out")


def test_folders_of_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make("llama", tmp_path / "model")
    adapters = peft_folder(tmp_path / "adapters", adapter("model.layers.0.self_attn.q_proj", 32, 32))
    base, saved = ["--weights", tmp_path / "model"], colossalai_checkpoint(tmp_path / "colossalai")
    for words in ([tmp_path / "model"], [adapters, *base], [saved]):
        assert printed(capsys, "inspect", *words)["iteration"] is None
        found = printed(capsys, "verify", *words)
        assert (found["ok"], found["iteration"]) == (True, None)
        assert of(found, "masters")["status"] == "not applicable"
    assert of(printed(capsys, "verify", adapters), "every-element-once")["status"] == "skipped"
    assert of(printed(capsys, "verify", tmp_path / "model"), "checksums")["status"] == "skipped"
    assert printed(capsys, "inspect", adapters)["error"]["kind"] == "UnsupportedCheckpointError"
    (tmp_path / "model" / "model.safetensors").unlink()
    (problem,) = printed(capsys, "verify", tmp_path / "model")["problems"]
    assert (problem["severity"], problem["check"]) == ("error", "complete")


def test_manifests(damaged: Fixture, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    manifest = tmp_path / "manifest"
    assert printed(capsys, "verify", damaged.run, "--record", manifest)["recorded"] == str(manifest)
    found = printed(capsys, "verify", damaged.run, "--against", manifest)
    assert {of(found, name)["status"] for name in ("recorded-files", "recorded-tensors")} == {"passed"}
    (damaged.iteration / "surplus").write_text("")
    found = printed(capsys, "verify", damaged.run, "--against", manifest)
    assert (found["exit_code"], of(found, "recorded-files")["status"]) == (1, "failed")
    assert [(problem["check"], problem["file"]) for problem in found["problems"]] == [("recorded-files", "surplus")]
    assert printed(capsys, "verify", damaged.run, "--against", tmp_path / "nothing")["exit_code"] == 2


def test_plan_and_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed(capsys, "plan", fixture_named("p02").run, "--gpus", "4")
    rehearsed = printed(capsys, "plan", fixture_named("p02").run, "--gpus", "4", "--rehearse", "tp=2")
    assert rehearsed["will_succeed"]
    assert not printed(capsys, "plan", fixture_named("p02").run, "--gpus", "3", "--rehearse", "tp=3")["will_succeed"]
    printed(capsys, "doctor", "--save", tmp_path)


def test_a_file_that_is_cut(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fixture = fixture_named("p01").copy_to(tmp_path / "copy")
    file = fixture.iteration / "__3_0.distcp"
    os.truncate(file, file.stat().st_size - 1000)
    found = printed(capsys, "verify", fixture.run)
    assert (found["ok"], found["exit_code"]) == (False, 1)
    assert of(found, "complete")["status"] == "failed"
    places = [(problem["check"], problem["file"], problem["offset"]) for problem in found["problems"]]
    assert ("complete", "__3_0.distcp", file.stat().st_size) in places


def test_a_flipped_bit(damaged: Fixture, capsys: pytest.CaptureFixture[str]) -> None:
    path, place = payload_position(mcore_ckpt_ext.open_checkpoint(damaged.run), "weight", MATRIX, 700)
    flip(path, place)
    found = printed(capsys, "verify", damaged.run)
    assert of(found, "checksums")["status"] == "failed"
    (problem,) = (problem for problem in found["problems"] if problem["check"] == "checksums")
    assert problem["file"] == path.name
    assert problem["offset"] <= place


def test_a_quick_check_lists_skipped_checks(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "verify", fixture_named("p01").run, "--quick")
    assert {of(found, name)["status"] for name in ("checksums", "masters", "values")} == {"skipped"}
    assert of(found, "complete")["status"] == "passed"
    assert of(found, "file-digests")["status"] == "not applicable"


@pytest.mark.parametrize("command", COMMANDS)
def test_errors(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if command not in ("doctor", "selftest"):
        more = {"plan": ["--gpus", "8"], "diff": [tmp_path], "convert": [tmp_path / "out", "--to", "canonical"]}
        found = printed(capsys, command, tmp_path / "nothing", *more.get(command, []))
        assert (found["exit_code"], found["error"]["kind"]) == (2, "UnreadableCheckpointError")
        assert "no such folder" in found["error"]["message"]
    found = printed(capsys, command, "--nonsense")
    assert found["error"]["kind"] == "UsageError"


def test_wrong_forms_of_the_option(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["verify", str(tmp_path), "--json=3"]) == 2
    assert "ignored explicit argument" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert main(["verify", str(fixture_named("p01").run), "--quick", "--js"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, "there is no such option; found: --js" in captured.err) == ("", True)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_of_several_processes_prints_an_error(
    rank: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "run"}.items():
        monkeypatch.setenv(name, value)
    assert main(["verify", "run", "--nonsense", "--json"]) == 2
    captured = capsys.readouterr()
    assert (captured.out.count("\n"), "no such option" in captured.err) == (int(rank == "0"), True)


def test_a_defect_of_ours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("mcore_ckpt_ext.cli.verify.run", broken)
    found = printed(capsys, "verify", "run")
    assert found["error"]["kind"] == "ZeroDivisionError"
