"""Test the command line in real processes, in an environment where Megatron cannot be imported."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.cli import doctor
from mcore_ckpt_ext.cli.main import COMMANDS, main
from mcore_ckpt_ext.cli.output import line
from mcore_ckpt_ext.errors import escape
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.settings import SETTINGS
from tests.harness.checkpoints import Fixture, fixture_named
from tests.harness.damage import MATRIX, flip, payload_position
from tests.harness.torch_release import LOADS_PLUGINS

REPOSITORY = Path(mcore_ckpt_ext.__file__).parents[1]


@pytest.fixture
def without_frameworks(tmp_path: Path) -> dict[str, str]:
    """An environment whose every import of a framework fails."""
    for name in ("megatron", "colossalai", "transformer_engine"):
        (tmp_path / "blocked" / name).mkdir(parents=True)
        (tmp_path / "blocked" / name / "__init__.py").write_text("raise ImportError('it is not here')\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "blocked"), str(REPOSITORY)])}


def command(
    environment: dict[str, str], *words: object, interpreter: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    finished = subprocess.run(
        [sys.executable, *interpreter, "-m", "mcore_ckpt_ext", *map(str, words)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "Traceback" not in finished.stderr
    return finished


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_inspect(without_frameworks: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = command(without_frameworks, "inspect", fixture_named("p01").run)
    assert (found.returncode, found.stderr) == (0, "")
    for text in (
        "dp_reshardable",
        "TP1 x PP4 x DP2, 8 ranks",
        "Megatron 0.16",
        "rank 3, writer 1 (pipeline 1, data 1)",
    ):
        assert text in found.stdout
    code, document, _ = said(capsys, "inspect", fixture_named("p01").run, "--json")
    assert (code, json.loads(document)["layout"]["PP"]) == (0, 4)


def without_progress(text: str) -> str:
    """Return stderr without progress, which is written if a command takes several seconds."""
    return re.sub(r"(?m)^ *\d+ %  .* left\n", "", text)


@pytest.mark.thorough
def test_all_that_is_offline_needs_no_framework(without_frameworks: dict[str, str], tmp_path: Path) -> None:
    """One process runs the commands, one after the other."""
    source, converted = str(fixture_named("p02").run), str(tmp_path / "converted")
    commands = [
        ["convert", source, converted, "--to", "legacy"],
        ["verify", converted],
        ["diff", source, converted],
    ]
    program = "import sys; from mcore_ckpt_ext.cli.main import main; print([main(words) for words in %r])"
    done = subprocess.run(
        [sys.executable, "-c", program % commands],
        env=without_frameworks, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.stdout.splitlines()[-1:], without_progress(done.stderr)) == (["[0, 0, 0]"], "")


@pytest.mark.thorough
def test_a_process_neither_collects_nor_finalizes_its_imports(without_frameworks: dict[str, str]) -> None:
    """Exit handlers run, all output arrives, and the garbage collector rarely runs."""
    program = """
import atexit, gc, sys
from mcore_ckpt_ext.cli.main import run_as_process
class Imported:
    def __del__(self):
        print("finalized")
held = Imported()
atexit.register(lambda: print("collections:", sum(generation["collections"] for generation in gc.get_stats())))
run_as_process()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "verify", fixture_named("p11").run],
        env=without_frameworks, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, without_progress(done.stderr)) == (1, "")
    *_, verdict, collections = done.stdout.splitlines()
    assert verdict.partition(":")[0] == "NOT SOUND"
    assert int(collections.removeprefix("collections: ")) < 100


def test_verify_and_its_exit_codes(damaged: Fixture, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "verify", damaged.run)
    assert (code, out.splitlines()[-1]) == (0, "sound")
    path, position = payload_position(open_checkpoint(damaged.run), "weight", MATRIX, 700)
    flip(path, position)
    code, out, _ = said(capsys, "verify", damaged.run)
    assert (code, out.splitlines()[-1]) == (1, "NOT SOUND: 2 errors")
    assert MATRIX in out
    code, out, err = said(capsys, "verify", damaged.run / "nothing")
    assert (code, out) == (2, "")
    assert "no such folder" in err


def test_diff_and_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    p01, p08b, p10 = (fixture_named(name).run for name in ("p01", "p08b", "p10"))
    code, out, _ = said(capsys, "diff", p01, p08b)
    assert (code, out.splitlines()[-1]) == (0, "equal in every bit, and in all settings")
    code, out, _ = said(capsys, "diff", p01, p10, "--kinds", "weight")
    assert (code, out.splitlines()[-1]) == (1, "DIFFERENT")
    assert "2,279 of 4,096 elements differ; by at most 0.00492859; the first at (0, 0)" in out
    assert "and 12 more of weight; --all lists them" in out


@pytest.mark.thorough
def test_doctor_without_megatron(without_frameworks: dict[str, str]) -> None:
    import_module("megatron.core")  # skipped where it cannot be installed: tests/conftest.py
    found = command({**without_frameworks, "MCORE_CKPT_EXT_VERIFY": "full"}, "doctor", "--json")
    lines = {item["what"]: item for item in json.loads(found.stdout)["lines"]}
    assert lines["MCORE_CKPT_EXT_VERIFY"]["found"].startswith("'full'")
    patch_point = lines["megatron.training.checkpointing.load_checkpoint"]
    assert "it is not here" in patch_point["found"]
    # megatron-core is installed here, as its distribution says, and cannot be imported: that is a failure to tell.
    assert patch_point["state"] == "FAILED"
    assert found.returncode == 1


@pytest.fixture
def without_megatron(installation: Path, tmp_path: Path) -> dict[str, str]:
    """An environment for `python -S` in which all is installed but Megatron."""
    site = tmp_path / "site"
    site.mkdir()
    for entry in {entry for path in sys.path if path.endswith("site-packages") for entry in Path(path).iterdir()}:
        if not entry.name.startswith(("megatron", "mcore_ckpt_ext", "__")) and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [installation, REPOSITORY, site]))}


@pytest.mark.thorough
def test_doctor_where_megatron_is_not_installed(without_megatron: dict[str, str]) -> None:
    """It has nothing to complain of, and does not say that all is in place."""
    found = command(without_megatron, "doctor", interpreter=["-S"])
    assert found.returncode == 0, found.stdout
    assert found.stdout.splitlines()[-1].startswith("no check failed, but Megatron is not installed here")
    # One line for each missing framework, none for each function of it.
    assert found.stdout.count("not installed: ModuleNotFoundError: No module named 'megatron'") == 1


def test_doctor_with_a_checkout_of_megatron(without_megatron: dict[str, str], tmp_path: Path) -> None:
    """Many have no distribution of it, but a clone on their path."""
    (tmp_path / "clone" / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "clone" / "megatron" / "core" / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path / "clone"), without_megatron["PYTHONPATH"]])
    program = "from mcore_ckpt_ext.cli import doctor; print(doctor._megatron().found)"
    found = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={**without_megatron, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == f"a checkout, {tmp_path / 'clone'}"


@pytest.mark.thorough
def test_doctor_with_a_megatron_that_cannot_be_imported(
    without_megatron: dict[str, str], without_frameworks: dict[str, str]
) -> None:
    path = os.pathsep.join([without_frameworks["PYTHONPATH"], without_megatron["PYTHONPATH"]])
    found = command({**without_megatron, "PYTHONPATH": path}, "doctor", "--all", interpreter=["-S"])
    assert found.returncode == 1
    assert "cannot be imported: ImportError: it is not here" in found.stdout


def test_doctor_shows_no_warnings_of_frameworks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "warning_framework.py").write_text("import warnings\nwarnings.warn('an old version')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert doctor._import_problem("warning_framework") is None
    assert shown == []


@pytest.mark.thorough
def test_doctor_with_megatron(tmp_path: Path) -> None:
    """The genuine one, imported; each patch point patched, in its version."""
    import_module("megatron.core")  # skipped where it cannot be installed: tests/conftest.py
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    found = command(environment, "doctor", "--save", tmp_path, "--json")
    report = json.loads(found.stdout)
    lines = {item["what"]: item["found"] for item in report["lines"]}
    assert lines["megatron.training.checkpointing.load_checkpoint"] == f"patched ({lines['megatron-core']})"
    assert lines["torch loads the hooks"].startswith("no: TORCH_DEVICE_BACKEND_AUTOLOAD=0")
    assert lines[f"writing in {tmp_path}"] == "the sidecar can be written"
    assert (found.returncode, report["healthy"]) == (0, True)
    assert list(tmp_path.iterdir()) == []


def test_doctor_where_nothing_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--save", str(tmp_path / "nothing")]) == 1
    output = capsys.readouterr().out
    assert "the sidecar would be missing" in output
    assert ("yes, at the end of `import torch`" in output) == LOADS_PLUGINS


@pytest.mark.parametrize("show_all", [False, True])
def test_doctor_joins_equal_lines_with_a_count(
    show_all: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for setting in SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    monkeypatch.setenv("MCORE_CKPT_EXT", "0")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    unset = len(SETTINGS) - 1
    assert main(["doctor", *(["--all"] if show_all else [])]) == 0
    out = capsys.readouterr().out
    assert out.count("not set") == (unset if show_all else 1)
    assert (f"{unset} environment variables" in out) == (not show_all)
    assert ("--all lists each check" in out) == (not show_all)
    assert "MCORE_CKPT_EXT " in out and "TORCH_DEVICE_BACKEND_AUTOLOAD" in out  # results of their own


def test_doctor_switched_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MCORE_CKPT_EXT", "0")
    assert main(["doctor"]) == 0
    assert "switched off: MCORE_CKPT_EXT=0" in capsys.readouterr().out


def test_doctor_reports_an_invalid_setting(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MCORE_CKPT_EXT", "0")
    monkeypatch.setenv("MCORE_CKPT_EXT_FALLBACK", "perhaps")
    assert main(["doctor"]) == 1
    assert "'perhaps': invalid value, ignored" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], *([name, "--frobnicate"] for name in COMMANDS)])
def test_help_and_wrong_usage_do_not_wait_for_torch(
    words: list[str], without_frameworks: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "blocked" / "torch").mkdir()
    (tmp_path / "blocked" / "torch" / "__init__.py").write_text("raise ImportError('help imports torch')\n")
    found = command(without_frameworks, *words)
    assert found.returncode == (0 if words == ["--help"] else 2), found.stderr
    assert ("usage: mcore-ckpt" in found.stdout) == (words == ["--help"])
    if words == ["--help"]:
        assert all(name in found.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    assert "usage: mcore-ckpt" in capsys.readouterr().out


def test_a_reader_that_has_seen_enough(without_frameworks: dict[str, str]) -> None:
    """`mcore-ckpt inspect ... | head -1`."""
    writer = subprocess.Popen(
        [sys.executable, "-m", "mcore_ckpt_ext", "inspect", str(fixture_named("p01").run), "--json"],
        env=without_frameworks, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    with writer.stderr:
        assert (writer.stderr.read(), writer.wait(timeout=60)) == ("", 0)


def test_a_defect_of_ours_does_not_pass_for_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mcore_ckpt_ext.operations.inspection.inspect", lambda *_, **__: 1 // 0)
    assert main(["inspect", "x"]) == 2
    assert "please report it" in capsys.readouterr().err


def test_untrusted_names_do_not_control_the_terminal() -> None:
    hostile = "\x1b[2Jname\r\x07‮evil\ud800"
    assert escape(hostile) == r"\x1b[2Jname\r\x07\u202eevil\ud800"


def test_results_are_readable_on_an_ascii_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    line("grün")
    sys.stdout.flush()
    assert written.getvalue() == rb"gr\xfcn" + b"\n"
