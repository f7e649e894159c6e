"""Test what disks and stores refuse: exit code 2, where, a hint and JSON, never a verdict; and what is published."""

from __future__ import annotations

import errno
import json
import os
import sys
import uuid
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import COMMANDS, main, run_as_process
from mcore_ckpt_ext.errors import CheckpointError, StorageError, UnreadableCheckpointError, UsageError
from mcore_ckpt_ext.storage.folder import Folder
from mcore_ckpt_ext.storage.paths import as_path
from tests.harness.checkpoints import Fixture, fixture_named
from tests.harness.json_schema import violations

REFUSED = [errno.EACCES, errno.EIO, errno.ESTALE, errno.ELOOP, errno.EMFILE]


def commands(run: Path, out: Path) -> list[list[str]]:
    return [["verify", str(run)], ["diff", str(run), str(run)], ["convert", str(run), str(out), "--to", "canonical"]]


@pytest.mark.thorough
@pytest.mark.parametrize("number", REFUSED, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_one_file_that_the_system_refuses(
    call: str, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = fixture_named("p10").run
    real, real_open = getattr(os, call), os.open
    refused: set[int] = set()

    def opened(path: Any, *more: Any, **options: Any) -> int:
        if str(path).endswith("__1_0.distcp"):
            if call == "open":
                raise OSError(number, os.strerror(number), str(path))
            descriptor = real_open(path, *more, **options)
            refused.add(descriptor)
            return descriptor
        return real_open(path, *more, **options)

    def read(descriptor: int, *more: Any) -> Any:
        if descriptor in refused:
            raise OSError(number, os.strerror(number))
        return real(descriptor, *more)

    monkeypatch.setattr(os, "open", opened)
    if call == "preadv":
        monkeypatch.setattr(os, "preadv", read)
    for words in commands(run, tmp_path / "out"):
        refused.clear()
        assert main([*words, "--json"]) == 2, words
        error = json.loads(capsys.readouterr().out)["error"]
        assert (error["kind"], error["found"]) == ("StorageError", os.strerror(number))
        assert "__1_0.distcp" in error["where"]
        assert error["hint"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["__0_0.distcp", "common.pt", "metadata.json", ".metadata"])
def test_a_link_that_leads_to_itself(file: str, damaged: Fixture, capsys: pytest.CaptureFixture[str]) -> None:
    (damaged.iteration / file).unlink()
    (damaged.iteration / file).symlink_to(file)
    assert main(["verify", str(damaged.run)]) == 2
    assert main(["inspect", str(damaged.run)]) in (0, 2)  # metadata may be all that is read
    capsys.readouterr()
    with pytest.raises(StorageError, match="link leads to itself"):
        mcore_ckpt_ext.convert(damaged.run, damaged.run.parent / "out", mcore_ckpt_ext.Canonical())


ERRORS: list[Callable[[], BaseException]] = [
    lambda: OSError(errno.ELOOP, "Too many levels of symbolic links", "run/a"),
    lambda: OSError(errno.EIO, "Input/output error"),
    lambda: PermissionError(errno.EACCES, "Permission denied", "run/a"),
    lambda: FileNotFoundError(errno.ENOENT, "No such file or directory", "run/a"),
    lambda: BrokenPipeError(errno.EPIPE, "Broken pipe"),
    lambda: TimeoutError("timed out"),
    lambda: StorageError("the remote store cannot be read", found="503", where="s3://a"),
    lambda: UnreadableCheckpointError("damaged"),
    lambda: UsageError("wrong"),
    lambda: CheckpointError("failed"),
    lambda: MemoryError(),
    lambda: RecursionError("too deep"),
    lambda: ZeroDivisionError("a defect"),
    lambda: KeyboardInterrupt(),
]


def _ended(command: str, error: BaseException, out: Path) -> int:
    """Run a command that ends by an error in a child whose stdout is a buffered file; return its exit code."""
    child = os.fork()
    if not child:
        module = import_module(f"mcore_ckpt_ext.cli.{command}")

        def run(_: object) -> int:
            raise error

        module.run = run  # type: ignore[attr-defined]
        sys.stdout = out.open("w")
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  - the child ends at once
        more = {"plan": ["--gpus", "8"], "diff": ["b"], "convert": ["b", "--to", "canonical"]}
        paths = [] if command in ("doctor", "selftest") else ["a", *more.get(command, [])]
        sys.argv = ["mcore-ckpt", command, *paths, "--json"]
        try:
            run_as_process()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.thorough
@pytest.mark.parametrize("command", COMMANDS)
def test_json_in_a_file_after_every_error(command: str, tmp_path: Path) -> None:
    from documentation.json_schemas import schema_of

    for make in ERRORS:
        code = _ended(command, make(), tmp_path / "out.json")
        text = (tmp_path / "out.json").read_text()
        assert text.count("\n") == 1, (make(), text)
        found = json.loads(text)
        assert violations(found, schema_of(command)) == []
        assert found["exit_code"] == code == (130 if isinstance(make(), KeyboardInterrupt) else 2)
        if isinstance(make(), OSError):
            assert found["error"]["kind"] == "StorageError"


@pytest.mark.parametrize("replaces", [False, True])
def test_what_cannot_be_removed_after_publishing(
    replaces: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, out = fixture_named("p02").run, tmp_path / "out"
    words = ["convert", str(source), str(out), "--to", "canonical", "--force"]
    if replaces:
        assert main(["convert", str(fixture_named("p10").run), str(out), "--to", "canonical"]) == 0
    remove = Folder.remove

    def refuse(folder: Folder, name: str) -> None:
        if ".partial-" in name:
            raise OSError(errno.EBUSY, "Device or resource busy", name)
        remove(folder, name)

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "remove", refuse)
        capsys.readouterr()
        assert main([*words, "--json"]) == 0
    (note,) = (note for note in json.loads(capsys.readouterr().out)["notes"] if "could not be removed" in note)
    (left,) = tmp_path.glob("out.partial-*")
    assert str(left) in note and f"the new {out} is complete" in note
    assert ("the folder that it replaced" in note) == replaces
    assert mcore_ckpt_ext.open_checkpoint(out).format.name == "canonical"
    assert main(words) == 0  # the next one tidies up
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_files_that_options_name_may_lie_in_a_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run, store = str(fixture_named("p10").run), f"memory://{uuid.uuid4()}"
    assert main(["verify", run, "--record", f"{store}/manifest", "--prometheus", f"{store}/run.prom"]) == 0
    assert main(["verify", run, "--against", f"{store}/manifest"]) == 0
    assert main(["inspect", run, "--html", f"{store}/page.html"]) == 0
    assert main(["plan", run, "--gpus", "4", "--html", f"{store}/plan.html"]) == 0
    assert {path.name for path in as_path(store).iterdir()} == {"manifest", "run.prom", "page.html", "plan.html"}
    as_path(f"{store}/other").write_bytes(b"something else")
    capsys.readouterr()
    for words in (["verify", run, "--record"], ["inspect", run, "--html"], ["verify", run, "--prometheus"]):
        assert main([*words, f"{store}/other"]) == 2
        assert "would overwrite" in capsys.readouterr().err
    for words in (["doctor", "--save"], ["selftest", "--folder"], ["selftest", "--json"]):
        assert main([*words, f"{store}/out"]) == 2
        assert "takes a path of this machine" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
