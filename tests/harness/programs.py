"""Programs that use Megatron Core, run one after the other in one launch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from megatron_on_cpu import launch

from tests.harness.jobs import RANK_SCRIPTS, TIME_LIMIT

RANKS = 4


class Programs:
    """The programs to run, and how each ended on the ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended: dict[str, set[str]] = {}
        self.output = ""
        self._orders: list[dict[str, object]] = []
        self._names: list[str] = []

    def place(self, name: str) -> Path:
        """Return a folder that a program may save to."""
        folder = self.folder / "saved" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def add(
        self,
        name: str,
        script: Path,
        *arguments: object,
        stock: bool = False,
        without: Sequence[Path] = (),
        commands: Sequence[Sequence[object]] = (),
    ) -> None:
        """Add a program; if it succeeds, its `wrapped` and `optimizer` are dumped.

        `stock`: whether it runs without the hooks. `without`: files to remove before it starts. `commands`: commands of
        `mcore-ckpt` that the first rank runs before it.
        """
        self._names.append(name)
        words = [str(argument) for argument in arguments]
        dump = str(self.folder / "dumps" / name)
        self._orders.append({
            "script": str(script), "arguments": words, "dump": dump, "stock": stock, "without": [*map(str, without)],
            "commands": [[*map(str, words)] for words in commands],
        })  # fmt: skip

    def run(self) -> None:
        """Run all programs."""
        order = self.folder / "order.json"
        order.write_text(json.dumps(self._orders))
        (self.folder / "dumps").mkdir()
        script = RANK_SCRIPTS / "programs_in_turn.py"
        result = launch.run(RANKS, script, [str(order)], timeout=TIME_LIMIT, log_file=self.folder / "log")
        assert result.returncode == 0, result.output[-6000:]
        self.output = result.output
        for number, name in enumerate(self._names):
            self.ended[name] = set(re.findall(rf"^\[rank \d\] === {number} (.*)$", result.output, re.MULTILINE))

    def printed(self, name: str, *texts: str) -> list[str]:
        """Return the lines of the first rank during a program that contain one of these texts."""
        own = [line for line in self.output.splitlines() if line.startswith("[rank 0] ")]
        ends = [place for place, line in enumerate(own) if line.startswith("[rank 0] === ")]
        number = self._names.index(name)
        turn = own[ends[number - 1] if number else 0 : ends[number]]
        return [line for line in turn if any(text in line for text in texts)]

    def dump(self, name: str) -> Path:
        """Return the dump of a program, which must have succeeded on all ranks."""
        assert self.ended[name] == {"done"}, self.ended[name]
        return self.folder / "dumps" / name
