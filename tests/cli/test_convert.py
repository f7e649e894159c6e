"""Test `mcore-ckpt convert` as a program: its output, its exit codes, and processes that share the work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mcore_ckpt_ext.cli.main import main
from tests.harness.checkpoints import fixture_named
from tests.harness.joined import free_port, in_processes

TIME_LIMIT = 120


def torchrun(processes: int, *words: object) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", free_port()]
    command = [sys.executable, *launcher, "-m", "mcore_ckpt_ext", "convert", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, check=False)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_result_is_summarized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(fixture_named("p01").run), str(tmp_path / "out"), "--to", "legacy", "--tensor-model-parallel-size=2"]
    assert main(["convert", *words]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"wrote {tmp_path / 'out'}: 18 files")
    assert "masters round to their weights" in output.out
    assert "note: the state of the random generators belongs to other ranks: resume with --no-load-rng" in output.out
    assert output.err == ""


def test_a_dry_run_estimates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(fixture_named("p01").run), str(tmp_path / "out"), "--to=torch_dist", "--dry-run"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[:2]] == [
        ["would", "write"],
        ["would", "read"],
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "torch_dist", "--megatron-version", "0.7"], "0.8 or later"),
        (["--to", "legacy", "--tensor-model-parallel-size", "3"], "divide"),
        (["--to", "legacy", "--memory-limit", "much"], "is not a size"),
        (["--to", "legacy", "--memory-limit", "0"], "is not a size"),
        (["--to", "hf", "--max-shard-size", "9" * 5000], "is not a size"),
        (["--to", "hf", "--max-shard-size", "5"], "'5' has no unit, and would be bytes; write for example 5GiB"),
        (["--to", "legacy", "--workers", "0"], "is not a whole number of 1 or more"),
        (["--to", "legacy", "--workers", "9" * 5000], "is not a whole number of 1 or more"),
        (["--to", "legacy", "--tensor-model-parallel-size", "0"], "is not a whole number of 1 or more"),
        (["--to", "canonical", "--dtype", "float16"], "--dtype has no meaning for --to canonical"),
        (["--to", "torch_dist", "--bin"], "--bin has no meaning for --to torch_dist"),
        (["--to", "torch_dist", "--from", "weight"], "--from has no meaning for --to torch_dist"),
        (["--to", "hf", "--megatron-version", "0.16"], "it belongs to --to torch_dist, legacy or fsdp_dtensor"),
        (["--to", "torch_dist", "--tensor-model-parallel-size", "2"], "it belongs to --to legacy"),
        (["--to", "torch_dist", "--for", "bridge", "--transformer-impl", "local"], "for jobs of Megatron-LM"),
        (["--to", "legacy", "--megatron-version", "new"], "invalid version of Megatron"),
        (["--to", "legacy", "--megatron-version", "7.0"], "unknown version of Megatron; found: 7.0"),
        (["--to", "legacy", "--megatron-version", "0.6"], "found: 0.6; expected: 0.7 to 0.19, or what follows it"),
        (["--to", "hdf5"], "invalid choice"),
        ([], "--to"),
    ],
)
def test_wrong_usage_ends_with_two_and_without_a_traceback(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["convert", str(fixture_named("p01").run), str(tmp_path / "out"), *words])
    except SystemExit as stopped:  # of argparse
        code = stopped.code
    output = capsys.readouterr()
    assert (code, output.out) == (2, "")
    assert message in output.err
    assert "Traceback" not in output.err
    assert not list(tmp_path.iterdir())


def test_each_target_has_its_own_options_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    groups: dict[str, str] = {}
    _, *parts = capsys.readouterr().out.split("only with ")
    for part in parts:
        title, _, text = part.partition(":\n")
        groups |= {line.split()[0]: title for line in text.splitlines() if line.startswith("  --")}
    assert groups == {
        "--tokenizer": "--to hf",
        "--quantize": "--to hf",
        "--lora-alpha": "--to hf",
        "--dtype": "--to hf",
        "--from": "--to hf",
        "--max-shard-size": "--to hf",
        "--bin": "--to hf",
        "--argument": "--to torch_dist or hf",
        "--tensor-model-parallel-size": "--to legacy",
        "--pipeline-model-parallel-size": "--to legacy",
        "--virtual-pipeline-model-parallel-size": "--to legacy",
        "--vocab-size": "--to legacy or hf",
        "--megatron-version": "--to torch_dist, legacy or fsdp_dtensor",
        "--expert-model-parallel-size": "--to torch_dist, legacy or fsdp_dtensor",
        "--transformer-impl": "--to torch_dist, legacy, canonical or fsdp_dtensor",
        "--for": "--to torch_dist",
        **{
            f"--source-{size}-size": "--to torch_dist, legacy, canonical or fsdp_dtensor"
            for size in (
                "tensor-model-parallel",
                "pipeline-model-parallel",
                "virtual-pipeline-model-parallel",
                "expert-model-parallel",
                "expert-tensor-parallel",
                "context-parallel",
            )
        },
    }


@pytest.mark.thorough
def test_four_processes_write_the_identical_folder(tmp_path: Path) -> None:
    source = fixture_named("p09").run
    assert main(["convert", str(source), str(tmp_path / "one"), "--to", "torch_dist"]) == 0
    ended = in_processes(4, tmp_path, "convert", source, tmp_path / "four", "--to", "torch_dist")
    assert [process.exit_code for process in ended] == [0] * 4, ended
    first, *others = [process.output for process in ended]
    assert files(tmp_path / "one") == files(tmp_path / "four")
    # The first process speaks for all, and counts what all have proven.
    assert first.count("wrote ") == 1
    assert "verified: 123,680 masters" in first
    assert not any("wrote " in said for said in others)


@pytest.mark.thorough
def test_the_failure_of_one_process_is_that_of_all(tmp_path: Path) -> None:
    """The first process finds the destination taken; the other waits for it in no collective."""
    (tmp_path / "out").mkdir()
    result = torchrun(2, fixture_named("p02").run, tmp_path / "out", "--to", "torch_dist")
    assert result.returncode != 0
    assert "the destination exists already" in result.stderr
    assert "process 0 failed, so all stop" in result.stderr
    assert not list((tmp_path / "out").iterdir())
