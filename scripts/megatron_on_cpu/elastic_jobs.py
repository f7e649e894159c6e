"""Jobs under torchrun's agents, which die and return, on CPU ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from megatron_on_cpu import launch

AGENTS = Path(__file__).with_name("elastic_agents.py")
_CHOICE = re.compile(r"--ckpt-ext-layout auto\S*: (\d+ of .*)")


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
        max_restarts: `--max-restarts`.
        environment: variables of agents and workers.
        plugins: Python files that every worker runs before the script.
        script: the training script.
        name: `--rdzv-id`.
        megatron: a checkout of Megatron-LM; without it, the installed megatron-core.
        forks: whether workers are forked from a process that has imported everything, or new processes.
        rendezvous: `--rdzv-conf`, where it differs from `elastic_agents.RENDEZVOUS`.
        timeout: seconds after which everything is killed.
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
    megatron: Path | None = None
    forks: bool = True
    rendezvous: Mapping[str, int] = field(default_factory=dict)
    timeout: float = 240

    def run(self, echo: TextIO | None = None) -> Ended:
        """Run it to its end.

        Args:
            echo: receives all output as it is written.

        Raises:
            RuntimeError: the agents have not ended in time, or wait for a line that does not come.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        order = self.folder / "order.json"
        order.write_text(json.dumps(asdict(self), default=str))
        result = launch.run(
            1,
            AGENTS,
            [str(order)],
            timeout=self.timeout,
            megatron=self.megatron,
            log_file=self.folder / "log",
            echo=echo,
        )
        if result.returncode:
            raise RuntimeError(f"the agents ended with {result.returncode}:\n{result.output[-8000:]}")
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
        return _CHOICE.findall(self.output)

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

    @property
    def timeline(self) -> list[tuple[float, str]]:
        """The lines of all agents and workers, each with the time of its arrival in seconds."""
        lines = (self.folder / "timeline").read_text().splitlines()
        return [(float(time), line) for time, _, line in (line.partition(" ") for line in lines)]
