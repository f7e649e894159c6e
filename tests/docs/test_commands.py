"""Test that every command of the README and the documentation runs, and prints what the page shows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from tests.docs.commands import NOT_COMMANDS, Command, Fence, fences_of, matches, sandbox_of
from tests.harness.checkpoints import fixture_named
from tests.harness.colossalai_folders import colossalai_checkpoint
from tests.harness.peft import adapter, peft_folder

pytestmark = pytest.mark.thorough

REPOSITORY = Path(mcore_ckpt_ext.__file__).parents[1]
# What a cluster has: `mcore-ckpt`, and programs in place of Slurm's.
STAND_INS = Path(__file__).with_name("stand_ins")
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
# Their commands start programs that take half of the time of all.
LONG = ("check-every-save", "monitoring", "retention", "slurm")
# What a page calls the folder in which it is: absolute paths of a real run begin with it.
HERE = "/data"
_SECONDS = re.compile(r"\b\d+\.\d s\b")
# Where the machine is slow; readers have a terminal, on which this line is overwritten.
_PROGRESS = re.compile(r"^ *\d+ %  .* left$")


class Sandbox:
    """A folder with a page's checkpoints, and what its commands left so far."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self._folder, self._capfd = folder, capfd
        self._code = 0
        self._names: dict[str, object] = {}

    def run(self, fence: Fence) -> None:
        if fence.is_script:
            (self._folder / fence.title).write_text(fence.text + "\n")
            subprocess.run(["bash", "-n", fence.title], check=True)
            return
        if fence.language == "python":
            exec(compile(fence.text, "<page>", "exec"), self._names)
            self._capfd.readouterr()
            return
        commands = fence.commands()
        for command, following in zip(commands, [*commands[1:], None], strict=True):
            is_asked = following is not None and following.words == "echo $?"
            self._compare(command, self._answer(command.words))
            assert self._code == 0 or is_asked or command.words == "echo $?", f"{command.words} ended with {self._code}"

    def _compare(self, command: Command, lines: list[str]) -> None:
        promised = [_SECONDS.sub("0.0 s", line) for line in command.output]
        said = [line.replace(str(self._folder), HERE) for line in lines if not _PROGRESS.match(line)]
        found = [_SECONDS.sub("0.0 s", line) for line in said]
        while found and not found[-1].strip():
            found.pop()
        while promised and not promised[-1].strip():
            promised.pop()
        assert not promised or matches(promised, found), "\n".join(["the page is not as it is:", *found])

    def _answer(self, words: str) -> list[str]:
        if words == "echo $?":
            return [str(self._code)]
        is_plain = words.startswith("mcore-ckpt ") and not set(words) & set("|&;<>$*#")
        if is_plain:
            try:
                self._code = main(shlex.split(words)[1:])
            except SystemExit as stopped:  # of argparse
                self._code = int(stopped.code or 0)
            told = self._capfd.readouterr()
            return (told.err + told.out).splitlines()
        environment = {
            **os.environ, "PYTHONPATH": str(REPOSITORY), "TEST_PYTHON": sys.executable,
            "PATH": f"{STAND_INS}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-c", words], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        self._code = done.returncode
        return (done.stderr + done.stdout).splitlines()


def _laid_out(kind: str, folder: Path) -> Path:
    if kind == "peft":
        return _adapter(folder)
    return colossalai_checkpoint(folder, weights="model") if kind == "colossalai" else fixture_named(kind).run


def _adapter(folder: Path) -> Path:
    """A PEFT folder for the model of the fixture p02."""
    heights = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    names = [
        (f"model.layers.{layer}.self_attn.{name}", height) for layer in range(4) for name, height in heights.items()
    ]
    tensors = {key: tensor for name, height in names for key, tensor in adapter(name, height, 32).items()}
    folder.mkdir()
    return peft_folder(folder / "adapter", tensors, target_modules=sorted(heights), task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.nightly] if page.stem in LONG else []) for page in PAGES],
    ids=lambda page: str(page.relative_to(REPOSITORY)),
)
def test_commands_of_a_page_print_their_output(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fences = [fence for fence in fences_of(page) if fence.is_run or fence.is_script]
    for name, number in sandbox_of(page).items():
        # With the times of today: the archives of the tests keep none.
        shutil.copytree(_laid_out(number, tmp_path / "from"), tmp_path / name, copy_function=shutil.copy)
    monkeypatch.chdir(tmp_path)
    sandbox = Sandbox(tmp_path, capfd)
    for fence in fences:
        sandbox.run(fence)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_command_is_run_or_exempt(page: Path) -> None:
    """A command outside of a `console` fence would not be run by anybody."""
    for fence in fences_of(page):
        assert fence.language in (*NOT_COMMANDS, "console", "python", "bash"), (
            f"a block of {fence.language or 'no language'}"
        )
        assert not fence.is_script or re.fullmatch(r"[\w.-]+", fence.title), "a script without the name of its file"
        assert fence.is_exempt or not fence.title or not fence.commands() or fence.is_run, fence.title
        assert fence.language != "text" or not re.search(r"^\$ |^mcore-ckpt ", fence.text, re.MULTILINE), fence.text


@pytest.mark.parametrize(
    "words",
    [
        "missing keys", "mismatch after resume", "not supported for DistributedOptimizer", "Cannot merge two lists",
        "Failed to load the backend extension",
    ],
)  # fmt: skip
def test_the_page_of_error_messages_has_what_users_search_for(words: str) -> None:
    assert words in (REPOSITORY / "docs" / "reference" / "errors.md").read_text()


@pytest.mark.parametrize(
    ("promised", "found", "is_equal"),
    [
        (["a", "...", "b"], ["a", "x", "y", "b"], True),
        (["a", "...", "b"], ["a", "b"], True),
        (["a ... c"], ["a b c  "], True),
        (["a"], ["a", "b"], False),
        (["a", "b"], ["a"], False),
        (["3 files"], ["4 files"], False),
    ],
)
def test_outputs_are_compared(promised: list[str], found: list[str], is_equal: bool) -> None:
    assert matches(promised, found) is is_equal


def test_continued_lines_are_one_command() -> None:
    (command,) = Fence("console", "", "$ mcore-ckpt diff \\\n    a b\nequal").commands()
    assert (command.words, command.output) == ("mcore-ckpt diff a b", ["equal"])
