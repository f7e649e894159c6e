"""Test the nightly script of "Verify every checkpoint" with a local S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mcore_ckpt_ext
from tests.docs.commands import fences_of
from tests.harness.checkpoints import fixture_named

pytestmark = [pytest.mark.thorough, pytest.mark.nightly]

REPOSITORY = Path(mcore_ckpt_ext.__file__).parents[1]
PAGE = REPOSITORY / "docs" / "how-to" / "check-every-save.md"
STAND_INS = Path(__file__).with_name("stand_ins")


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    moto = pytest.importorskip("moto.server", reason="moto[s3] is not installed")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        **os.environ, "PYTHONPATH": str(REPOSITORY), "TEST_PYTHON": sys.executable,
        "PATH": f"{STAND_INS}{os.pathsep}{os.environ['PATH']}", "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    server.stop()


def test_the_copy_is_complete_and_verified(environment: dict[str, str], tmp_path: Path) -> None:
    (script,) = (fence for fence in fences_of(PAGE) if fence.title == "nightly.sh")
    run = fixture_named("p01").copy_to(tmp_path / "p01").run
    (tmp_path / "make.py").write_text("import s3fs; s3fs.S3FileSystem().mkdir('bucket')")
    (tmp_path / "list.py").write_text("import s3fs; print(*s3fs.S3FileSystem().find('bucket'), sep='\\n')")
    text = f'"$TEST_PYTHON" make.py\n{script.text}\n"$TEST_PYTHON" list.py'
    done = subprocess.run(
        ["bash", "-c", text, "nightly.sh", str(run), "s3://bucket/run"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recorded files      ok" in done.stdout
    original = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    copied = {line.removeprefix("bucket/run/") for line in done.stdout.splitlines() if line.startswith("bucket/run/")}
    assert copied == original
