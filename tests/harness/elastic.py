"""Jobs under torchrun's agents, which die and return, on CPU ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_on_cpu import launch, toy_jobs

from tests.harness.jobs import RANK_SCRIPTS, SAVED, TIME_LIMIT

AGENTS = RANK_SCRIPTS / "elastic_agents.py"
_START = re.compile(r"--ckpt-ext-layout auto\S*: (\d+ of .*)")


@dataclass(frozen=True)
class Scenario:
    """A job under torchrun's agents.

    Attributes:
        folder: a folder of its own; checkpoints are in `checkpoints`.
        arguments: Megatron's.
        agents: the number of agents that start at once.
        ranks: workers of each agent.
        nodes: `--nnodes`.
        steps: what happens meanwhile, in turn: (pattern of a line to wait for, action, details). Actions: `open N`: the
            gate after iteration N; `start N`: another agent; `SIGKILL N`, `SIGTERM N`: a signal to an agent.
        gates: the iterations after which training stops until the gate is open.
    """

    folder: Path
    arguments: Sequence[str]
    agents: int = 2
    ranks: int = 2
    nodes: str = "1:2"
    steps: Sequence[Sequence[object]] = ()
    gates: Sequence[int] = ()
    max_restarts: int = 3
    environment: Mapping[str, str] = field(default_factory=dict)
    plugins: Sequence[Path] = ()
    script: Path = launch.TRAIN_GPT
    name: str = "job"

    def run(self) -> Ended:
        """Run it to its end."""
        self.folder.mkdir(parents=True, exist_ok=True)
        order = self.folder / "order.json"
        order.write_text(json.dumps(asdict(self), default=str))
        environment = {"TEST_RANK_SCRIPTS": str(RANK_SCRIPTS)}
        result = launch.run(
            1,
            AGENTS,
            [str(order)],
            timeout=TIME_LIMIT,
            environment=environment,
            log_file=self.folder / "log",
        )
        assert result.returncode == 0, result.output[-8000:]
        return Ended(self.folder, result.output)


@dataclass(frozen=True)
class Ended:
    """A job that has ended.

    Attributes:
        folder: its folder.
        output: the lines of all agents and workers.
    """

    folder: Path
    output: str

    @property
    def codes(self) -> dict[str, int]:
        """The exit code of each agent."""
        codes: dict[str, int] = self._result["codes"]
        return codes

    @property
    def left(self) -> list[str]:
        """The processes that are left."""
        left: list[str] = self._result["left"]
        return left

    @property
    def _result(self) -> dict[str, object]:
        (text,) = re.findall(r"\[agents\] result (.*)", self.output)
        result: dict[str, object] = json.loads(text)
        return result

    @property
    def choices(self) -> list[str]:
        """The layouts that were chosen, in words."""
        return _START.findall(self.output)

    @property
    def starts(self) -> list[str]:
        """A name for each start of the workers, in turn."""
        return (self.folder / "starts").read_text().split()

    def dump(self, start: int, moment: str) -> Path:
        """Return what the ranks of a start have dumped."""
        return self.folder / f"dump-{self.starts[start]}" / moment

    def losses(self, start: int) -> dict[int, float]:
        """Return the losses of a start by iteration."""
        record = json.loads((self.folder / f"losses-{self.starts[start]}.json").read_text())
        return {int(iteration): values["lm loss"] for iteration, values in record.items()}

    @property
    def iterations(self) -> list[str]:
        """The names of what is in the run folder."""
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())


def elastic_arguments(
    folder: Path, tensor: int = 1, pipeline: int = 4, *, every: int = SAVED, more: Sequence[str] = ()
) -> list[str]:
    """Return the arguments of a job of eight iterations that goes on by itself."""
    run = folder / "checkpoints"
    return toy_jobs.tiny_gpt(
        tensor, pipeline, iterations=8, save=run, save_interval=every, load=run,
        more=["--ckpt-ext-layout", "auto", "--make-vocab-size-divisible-by", str(128 // tensor), *more],
    )  # fmt: skip
