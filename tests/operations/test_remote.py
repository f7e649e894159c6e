"""Test remote stores through fsspec: in memory, and a local S3 server."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import (
    CheckpointError,
    DestinationError,
    UnreadableCheckpointError,
)
from mcore_ckpt_ext.storage.paths import as_path, file_sizes
from mcore_ckpt_ext.storage.remote import Upload
from mcore_ckpt_ext.targets import TARGETS
from tests.harness.checkpoints import Fixture, fixture_named

upath = pytest.importorskip("upath", reason="universal_pathlib is not installed")


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    # Imported here, for it takes a second.
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    moto = pytest.importorskip("moto.server", reason="moto[s3] is not installed")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.thorough)])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty remote folder; the address and the keys of S3 come from the environment, as they do for users."""
    if request.param == "memory":
        return upath.UPath(f"memory://{uuid.uuid4()}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_server"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # fsspec keeps its file systems for the whole process, one that an earlier test made without these keys included.
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    bucket = upath.UPath(f"s3://{uuid.uuid4()}")
    bucket.mkdir()
    return bucket


DIGESTS = "iter_0000004/mcore_ckpt_ext_digests.json"


def assert_truth(checkpoint: Any, fixture: Fixture) -> None:
    for key, expected in fixture.truth.items():
        kind, _, name = key.partition(".")
        assert torch.equal(checkpoint.tensor(kind, name).read(), expected), key


@pytest.mark.thorough
@pytest.mark.parametrize(("fixture", "to"), [("p10", "torch_dist"), ("p02", "legacy"), ("p02", "canonical")])
def test_written_there_and_read_from_there(fixture: str, to: str, store: Any, tmp_path: Path) -> None:
    source = fixture_named(fixture)
    remote = str(store / "run")
    mcore_ckpt_ext.convert(source.run, remote, TARGETS[to]())
    assert_truth(mcore_ckpt_ext.open_checkpoint(remote), source)
    # The same bytes as on this machine's disk, and nothing else.
    mcore_ckpt_ext.convert(source.run, tmp_path / "run", TARGETS[to]())
    local = {str(p.relative_to(tmp_path / "run")): p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    there = {str(p.path).rpartition("/run/")[2]: p.read_bytes() for p in (store / "run").rglob("*") if p.is_file()}
    if to == "torch_dist":  # the checksums of its many archives are only recorded here
        unrecorded = json.loads(there.pop(DIGESTS))
        recorded = json.loads(local.pop(DIGESTS))
        assert unrecorded == {**recorded, "checksums": dict.fromkeys(recorded["checksums"], "0" * 64)}
    assert there == local
    assert [p.name for p in store.iterdir()] == ["run"]
    mcore_ckpt_ext.convert(remote, tmp_path / "back", mcore_ckpt_ext.Canonical())
    assert_truth(mcore_ckpt_ext.open_checkpoint(tmp_path / "back"), source)


def test_an_interrupted_upload_is_no_checkpoint_and_can_be_continued(store: Any) -> None:
    source, remote = fixture_named("p02").run, str(store / "run")

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mcore_ckpt_ext.convert(source, remote, mcore_ckpt_ext.Legacy(), progress=stop, workers=1)
    with pytest.raises(UnreadableCheckpointError):
        mcore_ckpt_ext.open_checkpoint(remote)
    with pytest.raises(DestinationError, match="--resume"):
        mcore_ckpt_ext.convert(source, remote, mcore_ckpt_ext.Legacy())
    steps: list[int] = []
    mcore_ckpt_ext.convert(
        source, remote, mcore_ckpt_ext.Legacy(), resume=True, progress=lambda done, total: steps.append(done)
    )
    assert steps[0] > 0.2 * steps[-1]
    assert_truth(mcore_ckpt_ext.open_checkpoint(remote), fixture_named("p02"))


def test_output_of_a_changed_source_is_incomplete(tmp_path: Path) -> None:
    """The source changed: all but the files that say so may lie there, and it can be begun anew."""
    source = fixture_named("p01").copy_to(tmp_path / "source").run
    target, changed = f"memory://{uuid.uuid4()}/out", list[int]()

    def change(done: int, total: int) -> None:
        if not changed:
            changed.append(done)
            (source / "iter_0000004" / "metadata.json").touch()

    with pytest.raises(CheckpointError, match="the source changed while it was read"):
        mcore_ckpt_ext.convert(source, target, mcore_ckpt_ext.TorchDist(), progress=change)
    with pytest.raises(CheckpointError):
        mcore_ckpt_ext.open_checkpoint(target)


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library has errors of its own."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no credentials")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.put_file", refuse)
    target = f"memory://{uuid.uuid4()}/out"
    with pytest.raises(DestinationError, match="the remote store cannot be written.*no credentials"):
        mcore_ckpt_ext.convert(fixture_named("p01").run, target, mcore_ckpt_ext.Canonical())


def test_two_at_once(store: Any, tmp_path: Path) -> None:
    """Nothing is there yet but the claim of the first, whose first file may take minutes."""
    (tmp_path / "file").write_text("first")
    first, second, third = (Upload(as_path(store / "run"), fingerprint) for fingerprint in ("one", "one", "other"))
    first.open(resume=False)
    with pytest.raises(DestinationError, match="under way, or was interrupted.*--resume"):
        second.open(resume=False)
    with pytest.raises(DestinationError, match="had another source"):
        third.open(resume=True)
    first.put(tmp_path / "file", "file")
    second.open(resume=True)
    with pytest.raises(DestinationError, match="another conversion took"):
        first.put(tmp_path / "file", "file")


def test_an_existing_folder_is_not_replaced(store: Any) -> None:
    (store / "run").mkdir(parents=True, exist_ok=True)
    (store / "run" / "kept").write_text("kept")
    with pytest.raises(DestinationError, match="exists already"):
        mcore_ckpt_ext.convert(fixture_named("p02").run, str(store / "run"), mcore_ckpt_ext.TorchDist(), force=True)
    assert (store / "run" / "kept").read_text() == "kept"


def test_without_the_library_the_error_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['fsspec'] = None; import mcore_ckpt_ext\n"
        "try: mcore_ckpt_ext.open_checkpoint('s3://bucket/run')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "UnsupportedCheckpointError" in result.stdout
    assert "pip install fsspec" in result.stdout


def test_names_of_remote_files_have_no_scheme() -> None:
    folder = as_path(f"memory://{uuid.uuid4()}/run")
    (folder / "below" / "file").write_bytes(b"abc")
    assert file_sizes(folder) == {"below/file": 3}
    assert [str(path.relative_to(folder)) for path in folder.rglob("*")] == ["below/file"]


def test_paths_of_universal_pathlib_are_taken() -> None:
    source = fixture_named("p10")
    mcore_ckpt_ext.convert(source.run, upath.UPath(f"memory://{source.run.name}/out"), mcore_ckpt_ext.Canonical())
    assert_truth(mcore_ckpt_ext.open_checkpoint(upath.UPath(f"memory://{source.run.name}/out")), source)


# The many small files of zarr are the same to every store, and each is a request of S3.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("store", "name"), [("memory", "p01"), ("s3", "p01"), ("s3", "p08b"), ("memory", "p31")], indirect=["store"]
)
def test_commands_take_remote_folders(
    name: str, store: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = fixture_named(name).run
    for path in source.rglob("*"):
        if path.is_file():
            target = store / "run" / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    remote = str(store / "run")
    assert main(["inspect", remote, "--json"]) == 0
    there = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(source), "--json"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert {**there, "path": ""} == {**here, "path": ""}
    assert main(["verify", str(source), "--record", str(tmp_path / "manifest")]) == 0
    assert main(["verify", remote, "--against", str(tmp_path / "manifest")]) == 0
    assert main(["diff", remote, str(source)]) == 0
    # Cut off what the last record of a file needs: seen there, too.
    largest = max((path for path in (store / "run").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-5000])
    assert main(["verify", remote]) == 1
