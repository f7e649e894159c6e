"""Test messages of the hooks: they go through logging, and by default to stderr."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from mcore_ckpt_ext.patching import log as module
from mcore_ckpt_ext.patching.log import NAME, announce
from mcore_ckpt_ext.patching.singletons import Process


@pytest.fixture(autouse=True)
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The package's logger as a fresh process has it."""
    found = logging.getLogger(NAME)
    before = (found.handlers[:], found.level, found.propagate)
    found.handlers, found.propagate = [], True
    found.setLevel(logging.NOTSET)
    monkeypatch.setattr(module, "PROCESS", Process())
    monkeypatch.delenv("RANK", raising=False)
    yield found
    found.handlers, found.propagate = before[0], before[2]
    found.setLevel(before[1])


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_to_stderr_once_and_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        announce("two\n  lines")
    assert capsys.readouterr() == ("", "[mcore_ckpt_ext] two lines\n")


def test_an_event_is_logged_each_time_that_it_happens(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        announce("it happens", each_time=True)
    announce("it happens")
    assert capsys.readouterr() == ("", "[mcore_ckpt_ext] it happens\n" * 2)


def test_the_level_of_the_root_logger_does_not_matter(capsys: pytest.CaptureFixture[str]) -> None:
    """As `--logging-level 40` of Megatron sets it."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)
    try:
        announce("seen")
    finally:
        root.setLevel(before)
    assert capsys.readouterr().err == "[mcore_ckpt_ext] seen\n"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_program_takes_over(
    when: str, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    if when == "after":
        announce("first")
        assert "first" in capsys.readouterr().err
    kept = Kept()
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    announce("100 % of it")
    assert (kept.lines, capsys.readouterr().err) == (["100 % of it"], "")


def test_a_level_of_the_program_counts(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logger.setLevel(logging.ERROR)
    announce("not asked for")
    assert capsys.readouterr().err == ""


def test_other_ranks_log_only_their_own_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    announce("of all")
    announce("of rank 3", every_rank=True)
    assert capsys.readouterr().err == "[mcore_ckpt_ext] of rank 3\n"


def test_untrusted_names_do_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    announce("run\x1b[2J of \x07")
    assert capsys.readouterr().err == "[mcore_ckpt_ext] run\\x1b[2J of \\x07\n"
