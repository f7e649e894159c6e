"""Test every command on a store whose requests fail: exit code 2, where, a hint, and never a verdict on the content."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.storage.paths import as_path
from mcore_ckpt_ext.targets import TARGETS
from tests.harness.checkpoints import fixture_named
from tests.harness.faulty_store import FAULTS, FaultyStore, faulty_store

pytestmark = [pytest.mark.thorough, pytest.mark.nightly]


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyStore]:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    pytest.importorskip("moto.server", reason="moto[s3] is not installed")
    with faulty_store() as store:
        yield store


@pytest.fixture
def bucket(server: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import fsspec

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # The store's library repeats requests, with pauses that would make this test long.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.fail()
    name = f"s3://{uuid.uuid4()}"
    fsspec.filesystem("s3").mkdir(name)
    yield name
    server.fail()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def uploaded(folder: Path, remote: str) -> str:
    for path in folder.rglob("*"):
        if path.is_file():
            as_path(f"{remote}/{path.relative_to(folder)}").write_bytes(path.read_bytes())
    return remote


def printed(capsys: pytest.CaptureFixture[str], words: list[str]) -> dict[str, Any]:
    """Run a command with an empty cache; return its JSON object."""
    import fsspec

    fsspec.get_filesystem_class("s3").clear_instance_cache()
    code = main([*words, "--json"])
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    assert found["exit_code"] == code
    assert "this is a bug" not in captured.err, captured.err
    return found


def commands(run: str, out: str) -> list[list[str]]:
    return [
        ["inspect", run],
        ["verify", run],
        ["verify", run, "--quick"],
        ["diff", run, run],
        ["plan", run, "--gpus", "2"],
        ["convert", run, out, "--to", "canonical"],
    ]


# The last has a file of digests.
@pytest.mark.parametrize(("source", "number"), [*(("torch_dist", number) for number in range(6)), ("canonical", 2)])
def test_a_store_that_fails_while_reading(
    source: str, number: int, server: FaultyStore, bucket: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """From each of its requests on, in each of the ways."""
    run = fixture_named("p02").run
    if source != "torch_dist":
        convert(run, tmp_path / "run", TARGETS[source]())
        run = tmp_path / "run"
    words = commands(uploaded(run, f"{bucket}/run"), str(tmp_path / "out"))[number]
    server.fail()
    assert printed(capsys, [*words, *(["--dry-run"] if words[0] == "convert" else [])])["exit_code"] == 0
    count = server.requests
    assert count > 3
    for stage, first in enumerate(dict.fromkeys([*range(0, count, max(1, count // 5)), count - 1])):
        fault = FAULTS[stage % len(FAULTS)]
        server.fail_from(first, fault)
        found = printed(capsys, words)
        error = found["error"]
        assert (found["exit_code"], error["kind"]) == (2, "StorageError"), (first, fault, found)
        assert error["message"] == "the remote store cannot be read"
        assert error["where"].startswith(bucket), (first, fault, error)
        assert error["found"]
        expected = {"403": "credentials", "reset": "network", "500": "try again later", "503": "try again later"}
        assert expected[fault] in error["hint"], (fault, error)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("reads", "share"), [(False, 0.1), (False, 0.5), (True, 0.1), (True, 0.5)])
def test_a_conversion_with_a_store_that_often_fails_is_continued(
    reads: bool, share: float, server: FaultyStore, bucket: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, seed = fixture_named("p02"), 0
    place = str(tmp_path / "out") if reads else f"{bucket}/out"
    run = uploaded(source.run, f"{bucket}/run") if reads else str(source.run)
    words = ["convert", run, place, "--to", "canonical"]
    codes = list[int]()
    while not codes or codes[-1]:
        # Faults become rarer, so that the number of attempts has a bound.
        server.fail_often(share / (1 + len(codes) / 2), seed + len(codes))
        found = printed(capsys, [*words, *(["--resume"] if codes else [])])
        codes.append(found["exit_code"])
        if found["exit_code"]:
            assert found["error"]["kind"] in ("DestinationError", "StorageError"), found
            assert found["error"]["where"].startswith(bucket)
            assert found["error"]["hint"]
        assert len(codes) < 40
    server.fail()
    assert set(codes) <= {0, 2}
    assert share < 0.5 or 2 in codes
    checkpoint = mcore_ckpt_ext.open_checkpoint(place)
    for key, expected in source.truth.items():
        kind, _, name = key.partition(".")
        assert torch.equal(checkpoint.tensor(kind, name).read(), expected), key


@pytest.mark.parametrize("reads", [False, True])
def test_a_store_that_does_not_answer_ends_a_command(
    reads: bool,
    server: FaultyStore,
    bucket: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the time limit of the store's library, here one second."""
    import fsspec

    run = fixture_named("p02").run
    words = ["convert", str(run), f"{bucket}/out", "--to", "canonical"]
    if reads:
        words = ["verify", uploaded(run, f"{bucket}/run")]
    monkeypatch.setitem(
        fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 1, "retries": {"max_attempts": 0}}}
    )
    server.fail_from(6, "hang")
    found = printed(capsys, words)
    server.fail()
    assert found["exit_code"] == 2
    assert found["error"]["where"].startswith(bucket)
    assert "network" in found["error"]["hint"], found
