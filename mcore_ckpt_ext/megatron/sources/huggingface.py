"""Starts a job from a Hugging Face folder in `--load` or `--pretrained-checkpoint`.

Stock Megatron finds no tracker file in such a folder, logs one line about it, and trains from random weights
(`_load_base_checkpoint`, megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.collectives import agreed, is_first_rank
from mcore_ckpt_ext.errors import CheckpointError, ModelMismatchError, UsageError, with_indefinite_article
from mcore_ckpt_ext.families.config_keys import accepting
from mcore_ckpt_ext.families.contradictions import contradictions
from mcore_ckpt_ext.families.flags import training_flags
from mcore_ckpt_ext.families.forward_pass import notes_on
from mcore_ckpt_ext.formats.hugging_face.folder import CONFIG, is_model
from mcore_ckpt_ext.formats.hugging_face.model import LOCAL, TRANSFORMER_ENGINE, described_model
from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint
from mcore_ckpt_ext.formats.legacy.reader import NAME as LEGACY
from mcore_ckpt_ext.formats.torch_dist.reader import NAME as TORCH_DIST
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.model_arguments import complete
from mcore_ckpt_ext.megatron.live.model import Chunks, live_parameters
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.new_tokens import (
    initialization_kept,
    keeps_initialization,
    kept_message,
    new_tokens,
    refusal,
)
from mcore_ckpt_ext.megatron.sources.legacy_state_dict import presented
from mcore_ckpt_ext.model_space.anatomy import WORD_EMBEDDINGS
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.overrides import Scope, overridden
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
        if FROM_HF.chosen(arguments) and not _is_model(getattr(arguments, _PRETRAINED, None)):
            raise _no_folder(arguments)
        return
    formats, chosen = (TORCH_DIST, LEGACY), getattr(arguments, "ckpt_format", TORCH_DIST)
    wrong = [f"--{name.replace('_', '-')}" for name in _OTHER_WAYS if getattr(arguments, name, None)]
    if wrong := wrong + ([] if chosen in formats else [f"--ckpt-format {chosen}"]):
        raise UsageError(
            "this option does not allow a start from a Hugging Face folder", found=", ".join(wrong), where=str(folder),
            hint=_HINT,
        )  # fmt: skip
    with accepting(ACCEPT_KEYS.chosen(arguments)):
        described = described_model(folder, transformer_impl=_layer_spec(arguments))
    running = JobArguments.of(vars(arguments))
    if found := contradictions(described.family, described.arguments, running):
        raise ModelMismatchError(
            f"the arguments of the job contradict config.json, which describes "
            f"{with_indefinite_article(described.family.described)}",
            found="; ".join(found), where=str(folder / CONFIG),
            hint=f"describe the model of config.json: {shlex.join(training_flags(described.arguments))}",
        )  # fmt: skip


def _no_folder(arguments: Any) -> UsageError:
    named = str(getattr(arguments, "load", None))
    has_checkpoint = (Path(named) / TRACKER_FILE).exists()
    what = f"it holds {TRACKER_FILE}" if has_checkpoint else "no Hugging Face folder with a config.json and weights"
    return UsageError(
        f"{FROM_HF.flag}: --load names no Hugging Face folder to start from", found=what, where=named,
        hint="leave it out in a job that continues its own checkpoints: --load RUN --pretrained-checkpoint "
        "FOLDER reads FOLDER only while RUN has no checkpoint",
    )  # fmt: skip


def start_from(scope: Scope, folder: Path, chunks: Chunks, optimizer: Any, stock: Callable[[], Any]) -> Any:
    """Load this rank's part of a Hugging Face folder by stock Megatron's function. Collective.

    Args:
        scope: the globals of Megatron's checkpointing module.
        folder: the folder, on every rank.
        chunks: the unwrapped model chunks.
        optimizer: the live optimizer, whose masters are made of the weights; or None.
        stock: calls the original with all its arguments.

    Raises:
        ResumeRefusedError: on every rank, if the folder and the model do not match, or the folder is unreadable.
    """
    arguments = scope["get_args"]()
    agreed("comparing the arguments with config.json", lambda: check_arguments(arguments))
    new = agreed("comparing the vocabularies", lambda: _new_tokens(folder, arguments), "nothing is loaded")[0]
    left_out: list[str] = []
    registered: set[str] = set()

    def opened(live: set[str]) -> CheckpointView:
        checkpoint = _opened(folder, arguments)
        if checkpoint.family.origin:
            registered.add(f", {with_indefinite_article(checkpoint.family.described)}")
        if checkpoint.has_mtp and not any(name.startswith("mtp.") for name in live):
            with accepting(ACCEPT_KEYS.chosen(arguments)):
                checkpoint = checkpoint.without_mtp()
            left_out.append("MTP layers, which this job does not have (--mtp-num-layers)")
        _check_vocabulary(checkpoint, chunks)
        if checkpoint.left_out:
            left_out.append(f"{len(checkpoint.left_out)} tensors without an equivalent in Megatron")
        return checkpoint.view

    exists = overridden(scope, checkpoint_exists=lambda path: path is not None and Path(path) == folder)
    with exists, presented(scope, LoadSession(folder), chunks, opened), initialization_kept(chunks, new, optimizer):
        result = stock()
    grown = f"; {kept_message(new)}" if new else ""
    left = f"; left out: {'; '.join(left_out)}" if left_out else ""
    of_family = "".join(registered)
    announce(f"training starts from the weights of the Hugging Face folder {folder}{of_family}{left}{grown}")
    for line in notes_on(complete(JobArguments.of(vars(arguments)))):
        announce(f"unlike in the Hugging Face model, {line}")
    return result


def _layer_spec(arguments: Any) -> str:
    return LOCAL if getattr(arguments, "transformer_impl", None) == LOCAL else TRANSFORMER_ENGINE


def _opened(folder: Path, arguments: Any) -> HuggingFaceCheckpoint:
    """Open the folder for the job's layer spec, with the keys of `config.json` that the job accepts."""
    with accepting(ACCEPT_KEYS.chosen(arguments)):
        return HuggingFaceCheckpoint(folder, transformer_impl=_layer_spec(arguments))


def _new_tokens(folder: Path, arguments: Any) -> range:
    """Return the job's tokens without a row in the folder, on rank 0; empty on other ranks.

    Raises:
        ResumeRefusedError: there are such tokens, and the user does not accept them.
    """
    rows: list[int] = []
    if is_first_rank():
        with suppress(CheckpointError, OSError):  # the load itself reports errors of the folder
            rows.append(_opened(folder, arguments).vocabulary)
    tokens = new_tokens(rows[0] if rows else None, arguments)
    if tokens and not keeps_initialization():
        raise refusal(tokens, str(folder))
    return tokens


def _check_vocabulary(checkpoint: HuggingFaceCheckpoint, chunks: Chunks) -> None:
    """Refuse a model with fewer tokens than the folder; additional rows are padding.

    Raises:
        ModelMismatchError: the model has fewer tokens.
    """
    for live in live_parameters(chunks).values():
        tensor = live.tensors.get(WORD_EMBEDDINGS)
        if tensor is not None and tensor.shape[0] < checkpoint.vocabulary:
            raise ModelMismatchError(
                "the model has fewer tokens than the folder, and the last ones would be lost",
                found=f"{tensor.shape[0]} rows, padding included", expected=f"at least {checkpoint.vocabulary}",
                where=str(checkpoint.folder / CONFIG),
                hint=f"pass a larger --make-vocab-size-divisible-by, or --padded-vocab-size {checkpoint.vocabulary} if "
                "this Megatron has it",
            )  # fmt: skip
