"""Test messages of the hooks: they go through logging, and by default to stderr."""

from __future__ import annotations

import logging

import pytest

from mcore_ckpt_ext.patching.log import announce

pytestmark = pytest.mark.usefixtures("fresh_logger")


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
    when: str, fresh_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    if when == "after":
        announce("first")
        assert "first" in capsys.readouterr().err
    kept = Kept()
    fresh_logger.addHandler(kept)
    fresh_logger.setLevel(logging.INFO)
    announce("100 % of it")
    assert (kept.lines, capsys.readouterr().err) == (["100 % of it"], "")


def test_a_level_of_the_program_counts(fresh_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    fresh_logger.setLevel(logging.ERROR)
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
