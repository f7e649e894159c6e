"""Reads and runs the commands of a page, and compares their output with the page.

A page's fences are read as follows. `console`: lines that begin with `$ ` are commands, and the lines below are their
output; `...` on a line of its own stands for any lines, within a line for any text. `python`: run as it stands. A fence
whose title contains one of the marks of `EXEMPT`, which the reader sees, is not run. `bash`: a script, which the reader
saves under its title; later commands of the page run it. Other languages are files and outputs, not commands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

EXEMPT = ("needs a running job", "needs the network", "needs your cluster", "needs ColossalAI", "needs PEFT")
NOT_COMMANDS = ("text", "yaml", "json", "toml", "diff", "bibtex", "ini")
_FENCE = re.compile(r'^( *)```(\w*)(?: title="([^"]*)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
_SANDBOX = re.compile(r"<!-- sandbox: ([\w= -]+) -->")


@dataclass
class Command:
    """One command of a page and the output that the page promises."""

    words: str
    output: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fence:
    """A block of a page."""

    language: str
    title: str
    text: str

    @property
    def is_run(self) -> bool:
        return self.language in ("console", "python") and not self.is_exempt

    @property
    def is_exempt(self) -> bool:
        return any(mark in self.title for mark in EXEMPT)

    @property
    def is_script(self) -> bool:
        return self.language == "bash"

    def commands(self) -> list[Command]:
        found: list[Command] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append(Command(line[2:]))
            elif found and found[-1].words.endswith("\\"):
                found[-1].words = found[-1].words[:-1].rstrip() + " " + line.strip()
            elif found:
                found[-1].output.append(line)
        return found


def fences_of(page: Path) -> list[Fence]:
    """All blocks of a page, in order."""
    found = []
    for indent, language, title, text in _FENCE.findall(page.read_text()):
        found.append(Fence(language, title, "\n".join(line.removeprefix(indent) for line in text.splitlines())))
    return found


def sandbox_of(page: Path) -> dict[str, str]:
    """The folders that a page finds: name to the number of a fixture, `colossalai`, or `peft`."""
    match = _SANDBOX.search(page.read_text())
    return dict(pair.split("=") for pair in match[1].split()) if match else {}


def matches(promised: list[str], lines: list[str]) -> bool:
    """Whether an output is as the page has it."""
    pattern = ""
    for line in promised:
        text = line.rstrip()
        if text.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += r".*?".join(map(re.escape, text.split("..."))) + r" *\n"
    return re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in lines)) is not None
