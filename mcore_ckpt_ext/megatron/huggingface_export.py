"""Exports a Hugging Face folder, `hf/iter_...`, at intervals (`--ckpt-ext-export-hf EVERY`).

EVERY is a number of iterations.

A separate process makes it from the finished checkpoint, as `mcore-ckpt convert` does, while training continues. It
shares only the disk with the job, so that no error in it affects the save or the training.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.formats.torch_dist.reader import NAME as TORCH_DIST
from mcore_ckpt_ext.megatron.saving.save import Save
from mcore_ckpt_ext.megatron.sources.huggingface import named_model
from mcore_ckpt_ext.settings import EXPORT_HF, SWITCH
from mcore_ckpt_ext.storage.checkpoint_dirs import RELEASE

FOLDER = "hf"
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_GENTLE = ("nice", "-n", "10")
_MEMORY = "256MiB"
_SHOWN = 3


def check_export(arguments: Any) -> None:
    """Refuse to begin a job that could not write the requested folders.

    Args:
        arguments: Megatron's arguments, validated.

    Raises:
        UsageError: the job saves no checkpoints that can be exported.
    """
    every = EXPORT_HF.choose(arguments)
    if not every:
        return
    save = getattr(arguments, "save", None)
    interval = getattr(arguments, "save_interval", None)
    chosen = getattr(arguments, "ckpt_format", TORCH_DIST)
    obstacle = (
        f"{EXPORT_HF.flag} {every}"
        if every < 0
        else f"--save {save}"
        if not save or "://" in str(save)
        else f"--ckpt-format {chosen}"
        if chosen != TORCH_DIST
        else f"--save-interval {interval}"
        if not interval or every % interval
        else None
    )
    if obstacle is not None:
        raise UsageError(
            "no checkpoint of this job can be exported to Hugging Face",
            found=obstacle,
            expected=f"--save FOLDER, --ckpt-format {TORCH_DIST}, and {EXPORT_HF.flag} a multiple of --save-interval",
        )


def export_command(save: Save, arguments: Any) -> list[str] | None:
    """Return the command that exports a saved checkpoint; None if no export is requested for it.

    Args:
        save: a committed save.
        arguments: Megatron's arguments.
    """
    every = EXPORT_HF.choose(arguments)
    if every <= 0 or save.iteration % every or save.tracker_text == RELEASE:
        return None
    words = [sys.executable, "-m", "mcore_ckpt_ext", "convert", str(save.folder), str(destination(save))]
    words += ["--to", "hf", "--force", "--workers", "1", "--memory-limit", _MEMORY]
    tokenizer = named_model(arguments) or _folder(getattr(arguments, "tokenizer_model", None))
    words += ["--tokenizer", str(tokenizer)] if tokenizer is not None else []
    return [*_GENTLE, *words] if shutil.which(_GENTLE[0]) else words


def destination(save: Save) -> Path:
    """Return the path of a checkpoint's Hugging Face folder."""
    return save.folder.parent / FOLDER / save.folder.name


class Exports:
    """The exports of a job, one after the other, on the rank that commits its checkpoints.

    Args:
        start: runs a function in the background, after the functions before it.
        log: logs a line.
        warn: logs a warning, from every rank.
    """

    def __init__(
        self, start: Callable[[Callable[[], None]], object], log: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        self._start = start
        self._log = log
        self._warn = warn

    def follow(self, save: Save, arguments: Any) -> None:
        """Begin the export of a committed checkpoint if an export is requested for its iteration."""
        command = export_command(save, arguments)
        if command is not None:
            self._start(lambda: self._run(command, save))

    def _run(self, command: list[str], save: Save) -> None:
        begun = time.monotonic()
        place = destination(save)
        try:
            place.parent.mkdir(exist_ok=True)
            # The process has its own session and writes its output into a file, since a pipe would break: if the job
            # ends earlier, its checkpoint is complete, and the export can still finish.
            with tempfile.TemporaryFile("w+", errors="replace") as output:
                environment = environment_of(os.environ)
                result = subprocess.run(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    check=False,
                    start_new_session=True,
                )
                output.seek(0)
                problem = output.read() if result.returncode else None
        except OSError as error:
            problem = str(error)
        if problem is None:
            seconds = time.monotonic() - begun
            self._log(
                f"iteration {save.iteration} was also written as a Hugging Face folder: {place}, {seconds:.1f} s "
                "in the background"
            )
        else:
            output_end = " ".join(problem.strip().splitlines()[-_SHOWN:])
            self._warn(
                f"WARNING: no Hugging Face folder of iteration {save.iteration} was written to {place}; the "
                f"checkpoint itself is complete: {output_end}"
            )


def environment_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that is no rank of the job and uses no accelerator."""
    kept = {name: value for name, value in variables.items() if not name.startswith(_RANK_VARIABLES)}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", SWITCH.name: "0"}


def _folder(path: str | None) -> Path | None:
    return Path(path) if path and "://" not in path and Path(path).is_dir() else None
