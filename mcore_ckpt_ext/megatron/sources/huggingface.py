"""Starts a job from a Hugging Face folder in `--load` or `--pretrained-checkpoint`.

Stock Megatron finds no tracker file in such a folder, logs one line about it, and trains from random weights
(`_load_base_checkpoint`, megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2).
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import ModelMismatchError, UsageError, quantity, with_indefinite_article
from mcore_ckpt_ext.families.config_keys import accept_keys
from mcore_ckpt_ext.families.contradictions import contradictions
from mcore_ckpt_ext.families.flags import training_flags
from mcore_ckpt_ext.formats.hugging_face.folder import CONFIG, is_model
from mcore_ckpt_ext.formats.hugging_face.model import LOCAL, TRANSFORMER_ENGINE, described_model
from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint
from mcore_ckpt_ext.formats.legacy.reader import NAME as LEGACY
from mcore_ckpt_ext.formats.open_options import OpenOptions
from mcore_ckpt_ext.formats.torch_dist.reader import NAME as TORCH_DIST
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.live.model import Chunks, live_parameters
from mcore_ckpt_ext.model_space.anatomy import WORD_EMBEDDINGS
from mcore_ckpt_ext.settings import ACCEPT_KEYS, FROM_HF
from mcore_ckpt_ext.storage.checkpoint_dirs import TRACKER_FILE

_PRETRAINED = "pretrained_checkpoint"
_HINT = "convert it first (for Megatron-FSDP, --to fsdp_dtensor): mcore-ckpt convert SRC DST --to torch_dist"
# With these options the load does not go through a state dict of this rank.
_OTHER_WAYS = ("use_megatron_fsdp", "use_torch_fsdp2", "moe_use_upcycling", "non_persistent_ckpt_type")


def model_folder(arguments: Any, load_arg: str = "load") -> Path | None:
    """Return the Hugging Face folder that a job starts from.

    As in Megatron, `--pretrained-checkpoint` counts if `--load` names no checkpoint (`load_checkpoint`).

    Returns:
        The folder; None if Megatron has a checkpoint to load, or nothing to load.
    """
    for name in (load_arg, _PRETRAINED):
        directory = getattr(arguments, name, None)
        if directory and (Path(directory) / TRACKER_FILE).exists():
            return None
        if name == load_arg and getattr(arguments, "ckpt_step", None):
            return None
        if _is_model(directory):
            return Path(str(directory))
    return None


def named_model(arguments: Any) -> Path | None:
    """Return the Hugging Face folder that a job began with, even if it has checkpoints of its own now."""
    named = (getattr(arguments, name, None) for name in ("load", _PRETRAINED))
    return next((Path(str(directory)) for directory in named if _is_model(directory)), None)


def _is_model(directory: str | None) -> bool:
    return bool(directory) and "://" not in str(directory) and is_model(Path(str(directory)))


def check_arguments(arguments: Any) -> None:
    """Refuse to start from a Hugging Face folder with arguments that contradict it, on all ranks.

    Args:
        arguments: Megatron's arguments, validated.

    Raises:
        UsageError: there is no such folder, or an option requires another way of loading.
        ModelMismatchError: the arguments describe another model than `config.json` does.
    """
    folder = model_folder(arguments)
    if folder is None:
        if FROM_HF.choose(arguments) and not _is_model(getattr(arguments, _PRETRAINED, None)):
            raise _no_folder(arguments)
        return
    formats = (TORCH_DIST, LEGACY)
    chosen = getattr(arguments, "ckpt_format", TORCH_DIST)
    wrong = [f"--{name.replace('_', '-')}" for name in _OTHER_WAYS if getattr(arguments, name, None)]
    if wrong := wrong + ([] if chosen in formats else [f"--ckpt-format {chosen}"]):
        raise UsageError(
            "this option does not allow a start from a Hugging Face folder",
            found=", ".join(wrong),
            where=str(folder),
            hint=_HINT,
        )
    with accept_keys(ACCEPT_KEYS.choose(arguments)):
        described = described_model(folder, transformer_impl=_layer_spec(arguments))
    running = JobArguments.of(vars(arguments))
    if differences := contradictions(described.family, described.arguments, running):
        raise ModelMismatchError(
            f"the arguments of the job contradict config.json, which describes "
            f"{with_indefinite_article(described.family.described)}",
            found="; ".join(differences),
            where=str(folder / CONFIG),
            hint=f"describe the model of config.json: {shlex.join(training_flags(described.arguments))}",
        )


def _no_folder(arguments: Any) -> UsageError:
    named = str(getattr(arguments, "load", None))
    has_checkpoint = (Path(named) / TRACKER_FILE).exists()
    reason = f"it holds {TRACKER_FILE}" if has_checkpoint else "no Hugging Face folder with a config.json and weights"
    return UsageError(
        f"{FROM_HF.flag}: --load names no Hugging Face folder to start from",
        found=reason,
        where=named,
        hint="leave it out in a job that continues its own checkpoints: --load RUN --pretrained-checkpoint "
        "FOLDER reads FOLDER only while RUN has no checkpoint",
    )


def _layer_spec(arguments: Any) -> str:
    return LOCAL if getattr(arguments, "transformer_impl", None) == LOCAL else TRANSFORMER_ENGINE


def open_for_job(folder: Path, arguments: Any) -> HuggingFaceCheckpoint:
    """Open the folder for the job's layer spec, with the keys of `config.json` that the job accepts."""
    with accept_keys(ACCEPT_KEYS.choose(arguments)):
        return HuggingFaceCheckpoint(folder, OpenOptions(transformer_impl=_layer_spec(arguments)))


def check_vocabulary(checkpoint: HuggingFaceCheckpoint, chunks: Chunks) -> None:
    """Refuse a model with fewer tokens than the folder; additional rows are padding.

    Raises:
        ModelMismatchError: the model has fewer tokens.
    """
    for live in live_parameters(chunks).values():
        tensor = live.tensors.get(WORD_EMBEDDINGS)
        if tensor is not None and tensor.shape[0] < checkpoint.vocabulary:
            raise ModelMismatchError(
                "the model has fewer tokens than the folder, and the last ones would be lost",
                found=f"{quantity(tensor.shape[0], 'row')}, padding included",
                expected=f"at least {checkpoint.vocabulary}",
                where=str(checkpoint.folder / CONFIG),
                hint=f"pass a larger --make-vocab-size-divisible-by, or --padded-vocab-size {checkpoint.vocabulary} if "
                "this Megatron has it",
            )
