"""Trains, saves, and resumes under other layouts with genuine Megatron-LM; run by `demo.py` in its environment.

Every step is a separate job on CPU ranks. Optimizers are compared by dumps of live tensors, which share no code with
this package and never read a checkpoint.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from environment import REPOSITORY, folders_of_demonstration
from how_far import Iterations, MovingLine
from megatron_on_cpu import launch, toy_jobs
from megatron_on_cpu.dump_optimizer import FOLDER_VARIABLE, MOMENTS_VARIABLE, assemble
from megatron_on_cpu.record_losses import FILE_VARIABLE

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

SAVED, LAST = 10, 20
SOURCE = (1, 4)
TARGETS = ((2, 2), (1, 1), (4, 2))
RANKS = 8
# The padded vocabulary is a multiple of this times the tensor-parallel size; it is equal in all jobs, so losses are
# comparable.
PADDED_VOCABULARY = 128
TIME_LIMIT = 180
# Lines of a job's output that are repeated: those of this package, and Megatron's about asynchronous saves.
SHOWN = ("[mcore_ckpt_ext]", "scheduled an async checkpoint save", "successfully saved checkpoint")


@dataclass(frozen=True)
class Job:
    """A finished job: its first losses by iteration, and the folder of its dumps."""

    losses: dict[int, float]
    dumps: Path


class Demonstration:
    """The steps in order; each prints its result."""

    def __init__(self, folder: Path, megatron: Path | None = None) -> None:
        self._folder = folder
        self._checkpoints = folder / "checkpoints"
        self._megatron = megatron
        self._begun = time.monotonic()

    def run(self) -> int:
        """Run all steps, and return 0 if all elements of the optimizers are equal."""
        self._folder.mkdir(parents=True, exist_ok=True)
        source = self._train()
        self._show_refusal()
        resumed = {target: self._resume(target, step) for step, target in enumerate(TARGETS, start=4)}
        different = self._table(source, resumed)
        self._plot(source, resumed)
        print("\nOn your own checkpoint, in the environment where Megatron-LM is installed:\n")
        print(f"    pip install {REPOSITORY}")
        print("    torchrun ... pretrain_gpt.py ...  # your command as it is, with the new --tensor/--pipeline sizes\n")
        return 1 if different else 0

    def _train(self) -> Job:
        print(f"[2/6] training a small GPT as {_name(SOURCE)} on {RANKS} CPU ranks, {LAST} iterations;")
        print(f"      saved at iteration {SAVED} with --use-dist-ckpt --async-save", flush=True)
        flags = ["--use-dist-ckpt", "--async-save"]
        job = self._job("source", SOURCE, "save", save=self._checkpoints, more=flags)
        # Resume from the middle; the newest checkpoint is that of the last iteration.
        (self._checkpoints / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
        return job

    def _show_refusal(self) -> None:
        target = TARGETS[0]
        print(f"[3/6] stock Megatron resumes it as {_name(target)} (MCORE_CKPT_EXT=0)", flush=True)
        done = self._launch("stock", target, {"MCORE_CKPT_EXT": "0"}, load=self._checkpoints)
        errors = [line.partition("] ")[2] for line in done.output.splitlines() if "RuntimeError: (TP, PP)" in line]
        if done.returncode == 0 or not errors:
            raise SystemExit(f"stock Megatron was expected to refuse; see {self._folder / 'stock.log'}")
        print(f"      {errors[0]}")

    def _resume(self, target: tuple[int, int], step: int) -> Job:
        print(f"[{step}/6] the same command with the plugin, as {_name(target)}", flush=True)
        name = _name(target).replace(" ", "")
        return self._job(name, target, "load", load=self._checkpoints)

    def _job(
        self, name: str, layout: tuple[int, int], moments: str, *, save: Path | None = None, load: Path | None = None,
        more: list[str] | None = None,
    ) -> Job:  # fmt: skip
        losses, dumps = self._folder / f"{name}-losses.json", self._folder / f"{name}-dump"
        environment = {FILE_VARIABLE: str(losses), FOLDER_VARIABLE: str(dumps), MOMENTS_VARIABLE: moments}
        done = self._launch(name, layout, environment, save=save, load=load, more=more)
        for line in done.output.splitlines():
            for sign in SHOWN:
                if sign in line:
                    print(f"      {line[line.index(sign) :]}", flush=True)
        if done.returncode:
            raise SystemExit(f"the job failed; see {self._folder / name}.log")
        recorded = json.loads(losses.read_text())
        return Job({int(iteration): values["lm loss"] for iteration, values in recorded.items()}, dumps)

    def _launch(
        self, name: str, layout: tuple[int, int], environment: dict[str, str], *, save: Path | None = None,
        load: Path | None = None, more: list[str] | None = None,
    ) -> launch.RunResult:  # fmt: skip
        vocabulary = ["--make-vocab-size-divisible-by", str(PADDED_VOCABULARY // layout[0])]
        arguments = toy_jobs.tiny_gpt(
            *layout, iterations=LAST, save=save, save_interval=SAVED, load=load, more=[*vocabulary, *(more or [])]
        )
        log = self._folder / f"{name}.log"
        script = launch.TRAIN_GPT if self._megatron is None else self._megatron / "pretrain_gpt.py"
        far = Iterations()
        with MovingLine(lambda: far.text):
            done = launch.run(
                RANKS, script, arguments, timeout=TIME_LIMIT, megatron=self._megatron, environment=environment,
                log_file=log, echo=far,
            )  # fmt: skip
        so_far = time.monotonic() - self._begun
        print(f"      took {done.seconds:.0f} s; {so_far:.0f} s since the installation", flush=True)
        return done

    def _table(self, source: Job, resumed: dict[tuple[int, int], Job]) -> int:
        """Print the table, and return the number of different elements of the optimizers."""
        truth = assemble(source.dumps / f"after_save_{SAVED:07d}")
        shown = range(SAVED + 1, SAVED + 4)
        head = "".join(f"{f'loss {iteration}':>12}" for iteration in shown)
        print(f"\n{'layout':<32}{head}{'elements compared':>20}{'different':>12}")
        reference = "".join(f"{source.losses[iteration]:>12.6f}" for iteration in shown)
        print(f"{_name(SOURCE) + ', uninterrupted':<32}{reference}")
        total = 0
        for target, job in resumed.items():
            compared, different = compare(truth, assemble(job.dumps / "after_load"))
            losses = "".join(f"{job.losses[iteration]:>12.6f}" for iteration in shown)
            print(f"{_name(target) + ', resumed':<32}{losses}{compared:>20,}{different:>12,}")
            total += different
        return total

    def _plot(self, source: Job, resumed: dict[tuple[int, int], Job]) -> None:
        figure, axes = pyplot.subplots(figsize=(8, 5))
        axes.plot(*zip(*sorted(source.losses.items()), strict=True), "k-", linewidth=4, alpha=0.3, label=_name(SOURCE))
        for style, (target, job) in zip(("o", "x", "+"), resumed.items(), strict=True):
            points = zip(*sorted(job.losses.items()), strict=True)
            axes.plot(*points, style, label=f"resumed as {_name(target)}")
        axes.axvline(SAVED + 0.5, color="gray", linestyle=":", label="resumed here")
        axes.set(xlabel="iteration", ylabel="lm loss", title="One training, four layouts")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
        figure.tight_layout()
        figure.savefig(self._folder / "loss.png", dpi=120)
        print(f"\nloss curves: {self._folder / 'loss.png'}; logs of all ranks beside it")


def compare(truth: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Return the numbers of compared and of different elements; a missing tensor counts as different."""
    compared = different = 0
    for key, expected in truth.items():
        if key.startswith("weight."):
            continue
        found = other.get(key)
        compared += expected.numel()
        if found is None or found.shape != expected.shape:
            different += expected.numel()
        else:
            different += int((expected.view(torch.int32) != found.view(torch.int32)).sum())
    return compared, different


def _name(layout: tuple[int, int]) -> str:
    tensor, pipeline = layout
    return f"TP{tensor} x PP{pipeline} x DP{RANKS // tensor // pipeline}"


if __name__ == "__main__":
    raise SystemExit(Demonstration(*folders_of_demonstration(__doc__)).run())
