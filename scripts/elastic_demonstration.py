"""Trains through a node's death and its return under torchrun's agents; run by `demo.py --elastic`.

Two agents with two CPU ranks each stand for two nodes. One is killed by SIGKILL while the job trains; the job goes on
by itself on the other, and under its own layout again when the node returns. Workers are new processes, as torchrun's
are, so that the times include their imports.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
from elastic_parts import MARKS, seconds_of_parts, share_of_package
from environment import folders_of_demonstration
from how_far import Iterations, MovingLine
from megatron_on_cpu import launch, toy_jobs
from megatron_on_cpu.elastic_jobs import Ended, Scenario
from megatron_on_cpu.record_losses import FILE_VARIABLE

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

RANKS_OF_NODE = 2
SAVED_EVERY, DIES, RETURNS, LAST = 4, 10, 14, 20
EVENTS = {"node dies": ("SIGKILL", 1), "node returns": ("start", 2)}
TIME_LIMIT = 400
# Beginnings of the lines that are repeated: this package's, and what happens to agents.
SHOWN = ("[mcore_ckpt_ext]", "[agents] SIGKILL", "[agents] start")


class Demonstration:
    """The two jobs; each prints its result."""

    def __init__(self, folder: Path, megatron: Path | None = None) -> None:
        self._folder = folder
        self._megatron = megatron
        self._script = launch.TRAIN_GPT if megatron is None else megatron / "pretrain_gpt.py"

    def run(self) -> int:
        """Run both jobs and show their losses; return 0 if the elastic one has reached its end."""
        self._folder.mkdir(parents=True, exist_ok=True)
        print(
            f"[2/3] training a small GPT as TP1 x PP4 on 4 CPU ranks without interruption, {LAST} iterations",
            flush=True,
        )
        uninterrupted = self._uninterrupted()
        print(
            f"[3/3] the same on 2 nodes under torchrun's agents, with --ckpt-ext-layout auto, saved every {SAVED_EVERY}"
        )
        print(f"      iterations; a node is killed after iteration {DIES}, and returns after {RETURNS}", flush=True)
        elastic = self._elastic()
        starts = [elastic.losses(start) for start in range(len(elastic.starts))]
        _print_losses(uninterrupted, starts)
        _print_parts(elastic)
        self._plot(uninterrupted, starts)
        return 0 if LAST in starts[-1] else 1

    def _uninterrupted(self) -> dict[int, float]:
        losses = self._folder / "uninterrupted.json"
        far = Iterations()
        with MovingLine(lambda: far.text):
            done = launch.run(
                2 * RANKS_OF_NODE, self._script, self._arguments([]), timeout=TIME_LIMIT, megatron=self._megatron,
                environment={FILE_VARIABLE: str(losses)}, log_file=self._folder / "uninterrupted.log", echo=far,
            )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"the job failed; see {self._folder / 'uninterrupted.log'}")
        print(f"      took {done.seconds:.0f} s", flush=True)
        return {int(iteration): values["lm loss"] for iteration, values in json.loads(losses.read_text()).items()}

    def _elastic(self) -> Ended:
        folder = self._folder / "elastic"
        run = str(folder / "checkpoints")
        saving = ["--save", run, "--load", run, "--save-interval", str(SAVED_EVERY)]
        scenario = Scenario(
            folder,
            self._arguments([*saving, "--exit-signal-handler", "--ckpt-ext-layout", "auto"]),
            ranks=RANKS_OF_NODE,
            steps=[
                (rf"iteration +{DIES}/", *EVENTS["node dies"]),
                (f"at gate {RETURNS}", *EVENTS["node returns"]),
            ],
            gates=[RETURNS],
            plugins=[MARKS],
            script=self._script,
            megatron=self._megatron,
            forks=False,
            timeout=TIME_LIMIT,
        )
        far = Iterations()
        with MovingLine(lambda: far.text):
            ended = scenario.run(far)
        for _, line in ended.timeline:
            for sign in SHOWN:
                if sign in line:
                    print(f"      {line[line.index(sign) :]}")
        return ended

    def _arguments(self, more: list[str]) -> list[str]:
        # The padded vocabulary is a multiple of 128 in both jobs, so losses are comparable.
        return toy_jobs.tiny_gpt(1, 4, iterations=LAST, more=["--make-vocab-size-divisible-by", "128", *more])

    def _plot(self, uninterrupted: dict[int, float], starts: list[dict[int, float]]) -> None:
        figure, axes = pyplot.subplots(figsize=(8, 5))
        axes.plot(
            *zip(*sorted(uninterrupted.items()), strict=True), "k-", linewidth=4, alpha=0.3, label="uninterrupted"
        )
        for style, ranks, losses in zip("ox+", ("4 ranks", "2 ranks", "4 ranks again"), starts, strict=True):
            axes.plot(*zip(*sorted(losses.items()), strict=True), style, label=ranks)
        axes.axvline(DIES + 0.5, color="red", linestyle=":", label="a node dies")
        axes.axvline(RETURNS + 0.5, color="green", linestyle=":", label="it returns")
        axes.set(xlabel="iteration", ylabel="lm loss", title="One training, through the death of a node")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
        figure.tight_layout()
        figure.savefig(self._folder / "elastic.png", dpi=120)
        print(f"\nloss curves: {self._folder / 'elastic.png'}; the log of all agents in elastic/log beside it")


def _print_losses(uninterrupted: dict[int, float], starts: list[dict[int, float]]) -> None:
    """Print the losses of both jobs, each iteration of the elastic one as often as it was trained."""
    heads = "".join(f"{f'start {number}':>12}" for number in range(1, len(starts) + 1))
    print(f"\n{'iteration':>9}{'uninterrupted':>16}{heads}")
    for iteration, loss in sorted(uninterrupted.items()):
        cells = "".join(f"{losses[iteration]:>12.6f}" if iteration in losses else " " * 12 for losses in starts)
        print(f"{iteration:>9}{loss:>16.6f}{cells}".rstrip())


def _print_parts(elastic: Ended) -> None:
    """Print the time of each part of going on."""
    columns = [seconds_of_parts(elastic.timeline, f"{action} {agent}") for action, agent in EVENTS.values()]
    print(f"\n{'seconds until the next step':<30}{''.join(f'{name:>16}' for name in EVENTS)}")
    for part in columns[0]:
        print(f"{part:<30}{''.join(f'{seconds[part]:>16.2f}' for seconds in columns)}")
    print(f"{'together':<30}{''.join(f'{sum(seconds.values()):>16.2f}' for seconds in columns)}")
    print(f"{'choice and load':<30}{''.join(f'{share_of_package(seconds):>16.1%}' for seconds in columns)}")


if __name__ == "__main__":
    raise SystemExit(Demonstration(*folders_of_demonstration(__doc__)).run())
