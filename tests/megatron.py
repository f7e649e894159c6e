"""Genuine Megatron-LM 0.19.2 on CPU ranks, for tests that resume a checkpoint and look at the live optimizer."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from megatron_on_cpu import dump_optimizer, record_losses, toy_jobs
from megatron_on_cpu import launch as launcher

TIME_LIMIT = 240


def train(
    ranks: int,
    tensor: int,
    pipeline: int,
    *,
    folder: Path,
    padded_vocabulary: int = 128,
    more: Sequence[str] = (),
    plugins: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
) -> launcher.RunResult:
    """Train a toy job for five iterations; `folder / "checkpoints"` has iteration 4 for its newest checkpoint."""
    vocabulary = ["--make-vocab-size-divisible-by", str(padded_vocabulary // tensor)]
    arguments = toy_jobs.tiny_gpt(
        tensor, pipeline, iterations=8, save=folder / "checkpoints", more=[*vocabulary, *more, "--exit-interval", "5"]
    )
    result = _run(ranks, arguments, folder, "save", plugins, environment)
    if result.returncode == 0:
        (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    return result


def launch(
    ranks: int,
    load: Path,
    tensor: int,
    pipeline: int,
    *,
    folder: Path,
    padded_vocabulary: int = 128,
    more: Sequence[str] = (),
    plugins: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
) -> launcher.RunResult:
    """Resume a run folder of a toy job and train one more iteration; dumps go to `folder / "dump"`.

    The vocabulary is padded to the same size under every layout, so that whole tensors can be compared.
    """
    vocabulary = ["--make-vocab-size-divisible-by", str(padded_vocabulary // tensor)]
    # The schedule is that of the fixtures: eight iterations, of which four are done.
    arguments = toy_jobs.tiny_gpt(
        tensor, pipeline, iterations=8, load=load, more=[*vocabulary, *more, "--exit-interval", "5"]
    )
    return _run(ranks, arguments, folder, "load", plugins, environment)


def losses(folder: Path) -> dict[int, float]:
    """The loss of each iteration of the job that ran in `folder`."""
    record = json.loads((folder / "losses.json").read_text())
    return {int(iteration): values["lm loss"] for iteration, values in record.items()}


def assemble(dump: Path) -> dict[str, torch.Tensor]:
    """Model space as the live ranks held it."""
    return dump_optimizer.assemble(dump)


def _run(
    ranks: int,
    arguments: Sequence[str],
    folder: Path,
    moments: str,
    plugins: Sequence[Path],
    environment: Mapping[str, str] | None = None,
) -> launcher.RunResult:
    folder.mkdir(exist_ok=True)
    recording = {
        dump_optimizer.FOLDER_VARIABLE: str(folder / "dump"),
        dump_optimizer.MOMENTS_VARIABLE: moments,
        record_losses.FILE_VARIABLE: str(folder / "losses.json"),
    }
    return launcher.run(
        ranks,
        launcher.TRAIN_GPT,
        arguments,
        timeout=TIME_LIMIT,
        environment={**recording, **(environment or {})},
        plugin_files=plugins,
        log_file=folder / "log",
    )
