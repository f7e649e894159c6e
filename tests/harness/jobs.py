"""Real Megatron-LM jobs on CPU ranks, and the results that tests compare."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_on_devices
import torch
from megatron_on_cpu import launch, toy_jobs  # type: ignore[attr-defined]
from megatron_on_cpu.dump_optimizer import (
    FOLDER_VARIABLE,
    MOMENTS_VARIABLE,
    assemble,
    parameter_settings,
    training_state,
)
from megatron_on_cpu.record_losses import FILE_VARIABLE

from tests.harness.layouts import Layout

SAVED, LAST = 4, 8
RANK_SCRIPTS = Path(__file__).with_name("ranks")
WITNESS = RANK_SCRIPTS / "witness.py"
MAMBA_KERNELS = RANK_SCRIPTS / "mamba_kernels.py"
TIME_LIMIT = 240
# The environment of a job without this package.
OFF = {"MCORE_CKPT_EXT": "0"}
LEGACY = ["--ckpt-format", "torch"]
# How a load begins random states anew under another TP or PP.
SEEDED = f"random state is reinitialized from --seed and iteration {SAVED}"
SUMMARY = "[mcore_ckpt_ext] optimizer resumed from "
# The one line that a resume prints: from, to, format, bytes, parameters, elements, order sources, seconds.
SUMMARY_FORM = re.compile(
    r"optimizer resumed from (?P<source>TP\d.*?) as (?P<target>TP\d.*?): (?P<format>\w+( \+ \w+)*), "
    r"(?P<megabytes>[\d.,]+) MB read, "
    r"(?P<parameters>\d+) parameters verified equal to their weights( when rounded, ties either way)? "
    r"\((?P<elements>[\d,]+) elements, placed by (?P<witnesses>.+?)\), (?P<seconds>[\d.]+) s"
)


@dataclass(frozen=True)
class Job:
    """A job that succeeded."""

    folder: Path
    layout: Layout
    output: str

    @property
    def run(self) -> Path:
        """Its checkpoints."""
        return self.folder / "checkpoints"

    @property
    def iteration(self) -> Path:
        """The checkpoint of iteration 4."""
        return self.run / f"iter_{SAVED:07d}"

    @property
    def at_save(self) -> Path:
        """The live optimizer right after that checkpoint was saved."""
        return self.folder / "dump" / f"after_save_{SAVED:07d}"

    @property
    def at_load(self) -> Path:
        """The live optimizer right after loading."""
        return self.folder / "dump" / "after_load"

    @property
    def buffers(self) -> Path:
        """The content of its live gradient buffers at the save."""
        return self.folder / "buffers"

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each iteration, in full precision."""
        record = json.loads((self.folder / "losses.json").read_text())
        return {int(iteration): values["lm loss"] for iteration, values in record.items()}

    @property
    def said(self) -> list[str]:
        """The log lines of this package, with the rank that printed them."""
        return [line for line in self.output.splitlines() if "[mcore_ckpt_ext]" in line]

    @property
    def said_of_loads(self) -> list[str]:
        """These lines without the one by which random states begin anew under another TP or PP."""
        return [line for line in self.said if f"] {SEEDED}" not in line]

    @property
    def summary(self) -> re.Match[str]:
        """The one-line summary, which rank 0 prints exactly once."""
        lines = [line for line in self.said if SUMMARY in line]
        assert len(lines) == 1, lines
        assert lines[0].startswith("[rank 0] ")
        found = SUMMARY_FORM.search(lines[0])
        assert found is not None, lines[0]
        return found


def run_job(
    folder: Path,
    layout: Layout,
    *,
    environment: Mapping[str, str] | None = None,
    script: Path | str = launch.TRAIN_GPT,
    megatron: Path | None = None,
    plugins: Sequence[Path] = (),
    distributed: bool = True,
    on_gpus: bool = False,
    **job: Any,
) -> launch.RunResult:
    """Run a job, and return its result.

    `distributed`: whether it has the distributed optimizer. `on_gpus`: whether it runs on the GPUs of this machine.
    `job`: see `described`.
    """
    arguments, recording = described(folder, layout, **job)
    if not distributed:
        arguments.remove("--use-distributed-optimizer")
    if on_gpus:
        return megatron_on_devices.run(
            layout.ranks, script, arguments, timeout=TIME_LIMIT, environment={**recording, **(environment or {})},
            plugin_files=plugins, log_file=folder / "log",
        )  # fmt: skip
    return launch.run(
        layout.ranks,
        script,
        arguments,
        timeout=TIME_LIMIT,
        megatron=megatron,
        environment={**recording, **(environment or {})},
        plugin_files=plugins,
        log_file=folder / "log",
    )


def described(
    folder: Path,
    layout: Layout,
    *,
    load: Path | None = None,
    saves: bool = False,
    until: int = SAVED,
    precision: Sequence[str] = ("--bf16",),
    optimizer: Sequence[str] = ("--use-distributed-optimizer",),
    more: Sequence[str] = (),
    devices: Sequence[str] = toy_jobs.CPU,
) -> tuple[list[str], dict[str, str]]:
    """Describe a job of eight planned iterations that runs up to `until` and saves every fourth.

    Returns:
        Its arguments for Megatron, and the environment variables to record its losses and its optimizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = toy_jobs.tiny_gpt(
        layout.tensor,
        layout.pipeline,
        iterations=LAST,
        save=folder / "checkpoints" if saves else None,
        save_interval=SAVED,
        load=load,
        precision=precision,
        optimizer=optimizer,
        devices=devices,
        more=[
            *("--micro-batch-size", str(layout.samples_at_once)),
            *layout.flags,
            *more,
            *([] if until == LAST else ["--exit-interval", str(until)]),
        ],
    )
    return arguments, {
        FILE_VARIABLE: str(folder / "losses.json"),
        FOLDER_VARIABLE: str(folder / "dump"),
        MOMENTS_VARIABLE: "save" if saves else "load",
    }


def finished(folder: Path, layout: Layout, result: launch.RunResult) -> Job:
    """Return the job, after a check that it succeeded."""
    assert result.returncode == 0, result.output[-6000:]
    return Job(folder, layout, result.output)


def train_and_save(folder: Path, layout: Layout, *, records_buffers: bool = False, **options: Any) -> Job:
    """Train from the start; the checkpoint of iteration 4 is the newest, even if training continues.

    `records_buffers`: whether the content of its live gradient buffers is recorded; see `Job.buffers`.
    """
    if records_buffers:
        (folder / "buffers").mkdir(parents=True)
        options["plugins"] = [RANK_SCRIPTS / "record_buffers.py", *options.get("plugins", [])]
        options["environment"] = {"TEST_BUFFERS": str(folder / "buffers"), **options.get("environment", {})}
    job = finished(folder, layout, run_job(folder, layout, saves=True, **options))
    (job.run / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    return job


def resume(folder: Path, layout: Layout, load: Path, **options: Any) -> Job:
    """Resume and train one more iteration, or up to `until`."""
    options.setdefault("until", SAVED + 1)
    return finished(folder, layout, run_job(folder, layout, load=load, **options))


def copy_of(run: Path, folder: Path) -> Path:
    """Copy a run folder with its checkpoint of iteration 4, for a test that damages it."""
    name = f"iter_{SAVED:07d}"
    shutil.copytree(run / name, folder / name)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    return folder


def differing(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that differ in a bit, or that only one side has."""
    return [
        name for name in sorted(expected.keys() | found.keys()) if not _same_bits(expected.get(name), found.get(name))
    ]


def _same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def with_vocabulary(tensors: Mapping[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """Truncate the vocabulary's padding, or extend it with zeros, to a number of rows."""

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        missing = rows - tensor.shape[0]
        return tensor[:rows] if missing <= 0 else torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])

    padded = ("word_embeddings.weight", "output_layer.weight")
    return {name: resized(tensor) if name.endswith(padded) else tensor for name, tensor in tensors.items()}


def assert_same_optimizer(saved: Path, loaded: Path) -> None:
    """Check that two dumps contain the same model and optimizer: every element of every kind."""
    expected, found = assemble(saved), assemble(loaded)
    assert {name.partition(".")[0] for name in expected} == {"weight", "fp32_param", "exp_avg", "exp_avg_sq"}
    assert differing(expected, found) == []


def assert_same_training_state(saved: Path, loaded: Path) -> None:
    """Compare iteration, consumed samples, schedulers, gradient scalers; and each parameter's rate, decay and step."""
    assert training_state(saved) == training_state(loaded)
    expected, found = parameter_settings(saved), parameter_settings(loaded)
    assert expected.keys() == found.keys()
    for name, settings in expected.items():
        assert settings["step"] > 0
        assert found[name] == settings, name
