"""Test the error messages of the command line: the sentence, its details, the exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mcore_ckpt_ext
from mcore_ckpt_ext.cli import doctor
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.cli.output import json_text
from mcore_ckpt_ext.errors import CheckpointError, io_hint
from mcore_ckpt_ext.storage.atomic_files import cannot_write
from mcore_ckpt_ext.storage.json_tree import encode
from mcore_ckpt_ext.targets import TARGETS
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import without_digests
from tests.harness.terminal import on_terminal

REPOSITORY = Path(mcore_ckpt_ext.__file__).parents[1]
NOBODY = 65534


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[object, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    try:
        code: object = main([str(word) for word in words])
    except SystemExit as stopped:  # of argparse
        code = stopped.code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


@pytest.mark.parametrize(("gpus", "words"), [(1, "1 GPU, Megatron"), (2, "2 GPUs, Megatron")])
def test_numbers_agree_with_their_nouns(gpus: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "plan", fixture_named("p01").run, "--gpus", gpus)
    assert code == 0
    assert f" {words}" in out


class TestPattern:
    """One sentence, then details: each on a line of its own on a terminal, all in one line elsewhere."""

    def test_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = on_terminal(monkeypatch)
        monkeypatch.setenv("NO_COLOR", "1")
        assert main(["convert", "nothing", "out", "--to", "hf", "--megatron-version", "0.19"]) == 2
        assert terminal.getvalue().splitlines() == [
            "mcore-ckpt: error: --megatron-version has no meaning for --to hf",
            "  expected: it belongs to --to torch_dist, legacy or fsdp_dtensor",
            "  hint:     leave it out, or choose another target",
        ]

    def test_in_a_log(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, _, err = said(capsys, "inspect", "nothing")
        assert err == "mcore-ckpt: error: there is no such folder; where: nothing; hint: check the path\n"

    def test_without_details(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def fail(_: object) -> int:
            raise CheckpointError("process 0 failed, so all stop")

        monkeypatch.setattr(doctor, "run", fail)
        code, _, err = said(capsys, "doctor")
        assert (code, err) == (2, "mcore-ckpt: error: process 0 failed, so all stop\n")

    def test_a_long_one_is_summarized(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        keys = "; ".join(f"key_{number}" for number in range(200))

        def fail(_: object) -> int:
            raise CheckpointError("the keys are unknown", found=keys, where="/run" * 70, hint="leave them out")

        monkeypatch.setattr(doctor, "run", fail)
        _, out, err = said(capsys, "doctor", "--json")
        assert json.loads(out)["error"]["found"] == keys
        found, _, rest = err.partition("found: ")[2].partition(" ... (in full with --json)")
        assert keys.startswith(found + ";")
        assert len(found) <= 240
        assert rest == f"; where: {'/run' * 70}; hint: leave them out\n"

    def test_in_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, out, _ = said(capsys, "inspect", "nothing", "--json")
        assert json.loads(out)["error"] == {
            "kind": "UnreadableCheckpointError",
            "message": "there is no such folder",
            "found": None,
            "expected": None,
            "where": "nothing",
            "hint": "check the path",
        }

    @pytest.mark.parametrize(
        ("words", "sentence", "help_of"),
        [
            ([], "the following arguments are required: COMMAND", ""),
            (["inspekt"], "invalid choice: 'inspekt'", ""),
            (["inspect"], "the following arguments are required: PATH", "inspect "),
            (["inspect", "a", "--frobnicate", "b"], "there is no such option; found: --frobnicate b", "inspect "),
            (["plan", "a", "--gpus", "many"], "'many' is not a whole number of 1 or more", "plan "),
            (["plan", "a", "--gpus", "8", "--full"], "this option requires --rehearse", "plan "),
        ],
    )
    def test_wrong_usage_names_the_help_and_prints_no_usage(
        self, words: list[str], sentence: str, help_of: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, out, err = said(capsys, *words)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert err.startswith("mcore-ckpt: error: ")
        assert sentence in err
        assert err.endswith(f"hint: mcore-ckpt {help_of}--help\n")

    def test_a_conversion_without_a_format_lists_the_formats(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = said(capsys, "convert", "a", "b")
        lines = err.splitlines()
        assert (code, out) == (2, "")
        assert lines[0] == "mcore-ckpt: error: --to is missing: the format to write"
        assert [line.split()[1:3] for line in lines[1:-1]] == [["--to", name] for name in TARGETS]
        assert all(len(line.split()) > 5 for line in lines[1:-1])  # what each is, in words
        assert lines[-1] == "mcore-ckpt: hint: mcore-ckpt convert --help"


@pytest.mark.parametrize("command", ["verify", "diff"])
@pytest.mark.parametrize("workers", ["0", "-1", "many", "9" * 5000])
def test_workers(command: str, workers: str, capsys: pytest.CaptureFixture[str]) -> None:
    paths = ["x"] if command == "verify" else ["x", "y"]
    code, _, err = said(capsys, command, *paths, "--workers", workers)
    assert code == 2
    assert "is not a whole number of 1 or more" in err
    assert len(err) < 1000


class TestPaths:
    @pytest.mark.parametrize("command", ["inspect", "verify"])
    def test_nothing(self, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, err = said(capsys, command, tmp_path / "x")
        assert (code, "there is no such folder" in err, "check the path" in err) == (2, True, True)
        assert "--load" not in err

    def test_a_similar_one(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "iter_0000004").mkdir()
        err = said(capsys, "verify", tmp_path / "iter_4")[2]
        assert f"hint: did you mean {tmp_path / 'iter_0000004'}?" in err

    def test_the_home_folder_in_quotation_marks(self, capsys: pytest.CaptureFixture[str]) -> None:
        for words in (["verify", "~/run"], ["convert", str(fixture_named("p01").run), "~/out", "--to", "torch_dist"]):
            code, _, err = said(capsys, *words)
            assert (code, f"hint: write {Path.home()}/" in err) == (2, True)

    def test_one_too_many(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "there is no such argument; found: c;" in said(capsys, "diff", "a", "b", "c")[2]

    @pytest.mark.parametrize("words", [("inspect", ""), ("verify", ""), ("diff", "", "")])
    def test_an_empty_one(self, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
        code, _, err = said(capsys, *words)
        assert (code, "a path is empty" in err) == (2, True)

    @pytest.mark.parametrize("command", ["inspect", "verify"])
    def test_a_file(self, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "x").touch()
        err = said(capsys, command, tmp_path / "x")[2]
        assert "that is a file, not a folder" in err
        assert f"hint: pass the folder that holds it: {tmp_path}" in err

    @pytest.mark.parametrize("command", ["inspect", "verify"])
    def test_an_empty_folder(self, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, err = said(capsys, command, tmp_path)
        assert code == 2
        assert "no checkpoint in this folder; found: nothing, it is empty; expected: a run folder" in err

    @pytest.mark.parametrize("command", ["inspect", "verify"])
    def test_another_folder(self, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for name in ("notes.txt", "plot.png"):
            (tmp_path / name).touch()
        assert "found: notes.txt, plot.png; expected" in said(capsys, command, tmp_path)[2]

    def test_a_run_without_tracker(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for number in (2, 4):
            (tmp_path / f"iter_{number:07d}").mkdir()
        code, _, err = said(capsys, "inspect", tmp_path)
        assert code == 2
        assert "found: iter_0000004, iter_0000002;" in err
        assert f"hint: use {tmp_path / 'iter_0000004'}" in err

    @pytest.mark.parametrize("command", ["inspect", "verify"])
    def test_the_only_subfolder_that_is_one(
        self, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "tensorboard").mkdir()
        shutil.copytree(fixture_named("p02").run, tmp_path / "checkpoints")
        _, _, err = said(capsys, command, tmp_path)
        assert f"hint: use {tmp_path / 'checkpoints'}" in err
        assert said(capsys, command, tmp_path / "checkpoints")[0] == 0
        shutil.copytree(fixture_named("p02").run, tmp_path / "older")
        assert "hint: check the path" in said(capsys, command, tmp_path)[2]

    def test_an_iteration_that_is_not_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        shutil.copytree(fixture_named("p02").run, tmp_path / "run")
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").chmod(0o644)
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("9")
        code, _, err = said(capsys, "inspect", tmp_path / "run")
        assert code == 2
        assert "does not exist; found: iter_0000004; expected: iter_0000009" in err

    def test_a_store_without_credentials(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        pytest.importorskip("s3fs")
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        # Nothing of this machine, nor of a machine in a cloud, reveals the user.
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        code, _, err = said(capsys, "inspect", "s3://bucket/run")
        assert code == 2
        assert "the remote store cannot be read" in err
        assert "credentials" in err


class TestRights:
    @pytest.mark.parametrize("command", ["inspect", "verify", "diff"])
    @pytest.mark.parametrize("hidden", ["metadata.json", ".metadata", "__0_0.distcp"])
    def test_a_file_without_read_permission(self, command: str, hidden: str, tmp_path: Path) -> None:
        """By a user who is not the owner; as root nothing is forbidden, so another process becomes nobody."""
        if os.geteuid():
            pytest.skip("only root can become another user")
        shutil.copytree(fixture_named("p04").run, tmp_path / "run")
        (tmp_path / "run" / "iter_0000004" / hidden).chmod(0o000)
        for folder in (tmp_path, *tmp_path.parents[:3]):
            folder.chmod(0o755)
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            os.close(read_end)
            os.setuid(NOBODY)
            # Torch's own threads are gone in a child; it makes new ones, and not safely for several threads at once
            # (`leak_corrupted_threadpool`, caffe2/utils/threadpool/pthreadpool-cpp.cc).
            torch.set_num_threads(1)
            os.dup2(write_end, 1)
            os.dup2(write_end, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            paths = [tmp_path / "run"] * (2 if command == "diff" else 1)
            code = main([command, *map(str, paths)])
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        os.close(write_end)
        with os.fdopen(read_end) as stream:
            output = stream.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if command == "inspect" and hidden == "__0_0.distcp":
            assert code in (0, 2)  # metadata may be all that is read
            return
        assert code in (1, 2)
        assert "Permission denied" in output
        assert "interrupted" not in output
        assert "Traceback" not in output

    def test_the_hint_is_a_command_that_works(self) -> None:
        assert "chmod" in io_hint(PermissionError(13, "Permission denied"))
        assert "interrupted" in io_hint(FileNotFoundError(2, "No such file"))
        assert "free some space" in str(cannot_write(Path("x"), OSError(28, "No space left on device")))
        for number, text in ((13, "Permission denied"), (30, "Read-only file system")):
            refused = str(cannot_write(Path("x"), OSError(number, text)))
            assert "free some space" not in refused
            assert "that you may write to" in refused


class TestProcesses:
    """A command joins others only when torchrun started it, or the user says so."""

    def converted(self, capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> tuple[object, str, str]:
        return said(capsys, "convert", fixture_named("p02").run, folder / "out", "--to", "torch_dist", *words)

    def test_the_shell_of_a_training_pod(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        for name, value in {"WORLD_SIZE": "16", "RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        code, out, err = self.converted(capsys, tmp_path)
        assert (code, out.startswith("wrote "), err) == (0, True, "")

    @pytest.mark.parametrize("value", ["many", "", "-2", "٣", "9" * 5000])
    def test_a_size_that_is_none(
        self, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", value)
        code, out, err = self.converted(capsys, tmp_path, "--join")
        assert (code, out) == (2, "")
        assert "WORLD_SIZE is not a number" in err
        assert "torchrun" in err
        assert len(err) < 500

    def test_nowhere_to_meet(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        code, _, err = self.converted(capsys, tmp_path, "--join")
        assert code == 2
        assert "at which the processes meet is missing; expected: MASTER_ADDR and MASTER_PORT" in err

    def test_waiting_is_reported(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "70000"}.items():
            monkeypatch.setenv(name, value)
        code, _, err = self.converted(capsys, tmp_path, "--join")
        assert code == 2
        assert "waiting for the 2 processes that share the work, at h:70000" in err
        assert "could not connect; found: port must have value from 0 to 65535" in err


def test_expert_parallel_ranks_of_a_dense_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for to in ("legacy", "torch_dist"):
        words = ["--to", to, "--expert-model-parallel-size", "4"]
        code, _, err = said(capsys, "convert", fixture_named("p02").run, tmp_path / "out", *words)
        assert code == 2
        assert "no experts to distribute over expert-parallel ranks; found: --expert-model-parallel-size 4" in err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_opens_nothing_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o555)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    written: list[str] = []
    opened = os.open

    def watched(path: object, flags: int, *more: object, **options: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            written.append(str(path))
        return opened(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", watched)
    code, out, _ = said(capsys, "convert", fixture_named("p02").run, tmp_path / "out", "--to", "legacy", "--dry-run")
    assert (code, out.startswith("would write"), written) == (0, True, [])
    assert not list(tmp_path.iterdir())


def test_json_has_no_number_that_json_has_not() -> None:
    text = json_text({"loss": float("nan"), "most": [float("inf"), (float("-inf"), 1.5)]})
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found == {"loss": "NaN", "most": ["Infinity", ["-Infinity", 1.5]]}


def test_json_of_a_checkpoint_whose_learning_rate_is_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "run", mcore_ckpt_ext.Canonical())
    about = json.loads((tmp_path / "run" / "common.json").read_text())
    text = json.dumps(about["param_groups"])
    rate = str(about["param_groups"][0]["lr"])
    assert rate in text
    about["param_groups"] = json.loads(text.replace(rate, "NaN"))
    (without_digests(tmp_path / "run") / "common.json").write_text(json.dumps(about))
    code, out, err = said(capsys, "inspect", tmp_path / "run", "--json")
    assert code == 0, err
    json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


FORGED = "verified: 9,999 masters round to their weights"


@pytest.mark.parametrize("name", ["verify", "convert", "diff", "inspect"])
def test_untrusted_names_write_no_lines_of_their_own(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "run", mcore_ckpt_ext.Canonical())
    about = json.loads((tmp_path / "run" / "common.json").read_text())
    about["common"][f"key\n{FORGED}\r\x1b[2J\u202e"] = encode(torch.zeros(3))
    about["common"]["args"]["$namespace"]["transformer_impl"] = f"local\n{FORGED}\x1b[2J"
    (without_digests(tmp_path / "run") / "common.json").write_text(json.dumps(about))
    more = {"convert": [tmp_path / "out", "--to", "torch_dist"], "diff": [tmp_path / "run"]}.get(name, [])
    _, out, err = said(capsys, name, tmp_path / "run", *more)
    assert FORGED in out
    assert not [line for line in (out + err).splitlines() if line.startswith(FORGED)]
    assert (out + err).replace("\n", "").isprintable()


def test_nor_does_an_error_outside_of_the_command_line() -> None:
    error = CheckpointError("what\n  is wrong\x1b[2J", found=f"name\n{FORGED}", where="a\rb", hint="nothing")
    assert str(error) == f"what\n  is wrong\\x1b[2J; found: name\\n{FORGED}; where: a\\rb; hint: nothing"


def test_a_closed_or_full_stdout() -> None:
    shell = f"{sys.executable} -m mcore_ckpt_ext inspect {fixture_named('p02').run}"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for redirection, code, expected in ((">&-", 0, ""), ("> /dev/full", 2, "No space left on device")):
        done = subprocess.run(
            f"{shell} {redirection}", shell=True, env=environment, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert expected in done.stderr
        assert len(done.stderr.splitlines()) == bool(expected)


def test_nothing_is_imported_from_the_current_folder(tmp_path: Path) -> None:
    """A folder of a stranger may hold a `torch.py`, or whatever else the program imports, from its first line on.

    What Python imports by itself before that is left out; `-S`, since files of site-packages would import more first.
    """
    alone = [sys.executable, "-S", "-c", "import runpy, sys; print(*sys.modules)"]
    before = subprocess.run(alone, capture_output=True, text=True, check=True).stdout.split()
    others = {"torch", "numpy", "yaml", "isal", "fsspec", "typing_extensions", "sitecustomize", "usercustomize"}
    for name in ({*sys.stdlib_module_names} | others) - {*before}:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} is imported from the current folder')")
    done = subprocess.run(
        [sys.executable, "-S", "-m", "mcore_ckpt_ext", "inspect", str(fixture_named("p02").run)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])},
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("is_persistent_there", [True, False])
def test_a_newer_non_persistent_checkpoint_is_mentioned(
    is_persistent_there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not where there is no other that a command could take."""
    run = fixture_named("p01").run
    newer = tmp_path / "run" / "non_persistent"
    shutil.copytree(run, newer)
    if is_persistent_there:
        shutil.copytree(run, tmp_path / "run", dirs_exist_ok=True)
    _, _, err = said(capsys, "verify", tmp_path / "run", "--quick")
    assert ("the newest persistent checkpoint of" in err) == is_persistent_there
    assert str(newer) in err
