"""Checks that a checkpoint and a live job are compatible before a resume is planned."""

from __future__ import annotations

from operator import eq
from pathlib import Path

from mcore_ckpt_ext.errors import (
    ModelMismatchError,
    ProofError,
    UnreadableCheckpointError,
    UnsupportedCheckpointError,
    join_some,
    quantity,
)
from mcore_ckpt_ext.formats.adapter_order import loop_of, size_ordered_adapters
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.differences import SAME_MODEL
from mcore_ckpt_ext.job.hybrid_pattern import is_hybrid
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.megatron.live.model import NEW, NameFunction, quantization_check
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import Shard
from mcore_ckpt_ext.model_space.anatomy import is_output_layer, output_layer_of, word_embeddings_in
from mcore_ckpt_ext.model_space.gpt_in_hybrid import names_in_gpt
from mcore_ckpt_ext.model_space.names import name_in
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.settings import ACCEPT_LOST
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

_ROUNDED = {"bfloat16": "--bf16", "float16": "--fp16"}


def name_map_for(checkpoint: CheckpointView, live: set[str], arguments: JobArguments | None = None) -> NameFunction:
    """Return a function that maps live names to the checkpoint's; `str` if all are equal, as usual.

    Names differ if the layer spec differs, or if a hybrid model resumes from a GPT.

    Args:
        checkpoint: the checkpoint.
        live: the names of all parameters and buffers of the live model.
        arguments: the arguments of the running job, if it may have another kind of model.

    Raises:
        CheckpointError: a hybrid model cannot resume from this GPT.
    """
    stored_names = set(checkpoint.names(WEIGHT))
    counterparts = {name: name for name in live}
    if arguments is not None and becomes_hybrid(checkpoint.job.arguments(), arguments):
        layers = checkpoint.job.arguments().num_layers
        of_gpt = names_in_gpt(str(arguments.hybrid_layer_pattern), layers, live)
        counterparts = {name: NEW + name if in_gpt is None else in_gpt for name, in_gpt in of_gpt.items()}
    spelled = {name: name_in(stored_names, counterpart) for name, counterpart in counterparts.items()}
    return str if all(map(eq, spelled, spelled.values())) else lambda name: spelled.get(name, name)


def becomes_hybrid(written: JobArguments, running: JobArguments) -> bool:
    """Return True if a hybrid model resumes from a GPT.

    Source: `_maybe_setup_gpt_to_hybrid_load`, megatron/training/checkpointing.py, core_v0.19.2.
    """
    return bool(running.hybrid_layer_pattern) and not is_hybrid(written)


def check_names(checkpoint: CheckpointView, live: set[str]) -> None:
    """Refuse a model that would leave stored parameters unused, or whose output layer is not stored.

    Args:
        checkpoint: the checkpoint.
        live: the names of all parameters and buffers of the live model, as in the checkpoint.

    Raises:
        ModelMismatchError: the checkpoint holds a tensor that no rank's model has, or its embeddings are tied and the
            model's are not.
    """
    stored = checkpoint.names(WEIGHT)
    unused = [name for name in stored if name not in live]
    if unused:
        raise ModelMismatchError(
            "the checkpoint holds parameters that the model does not have",
            found=f"{len(unused)} of them, {', '.join(unused[:3])}",
            where=str(checkpoint.files.folder),
            hint="resume with --untie-embeddings-and-output-weights, as the checkpoint was written"
            if all(map(is_output_layer, unused))
            else SAME_MODEL,
        )
    embeddings = word_embeddings_in(stored)
    output_layer = embeddings and output_layer_of(embeddings)
    if output_layer in live and output_layer not in stored:
        raise ModelMismatchError(
            "the model has its own output layer, but the embeddings of the checkpoint are tied",
            found="no such parameter in the checkpoint",
            expected=output_layer,
            where=str(checkpoint.files.folder),
            hint="resume without --untie-embeddings-and-output-weights; to train a new output layer with a new "
            "optimizer: --no-load-optim --dist-ckpt-strictness log_all",
        )


def check_optimizer_was_saved(written: JobArguments, folder: str) -> None:
    """Refuse to resume an optimizer that the job of the checkpoint did not save.

    Megatron fails with a KeyError after it has loaded the weights (`load_checkpoint`,
    megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2).

    Args:
        written: the arguments of the job that wrote the checkpoint.
        folder: the checkpoint's folder.

    Raises:
        ModelMismatchError: it was saved with --no-save-optim.
    """
    if written.no_save_optim:
        raise ModelMismatchError(
            "the checkpoint has no optimizer: it was saved with --no-save-optim",
            expected="the state of an optimizer to resume",
            where=folder,
            hint="resume with --no-load-optim, which initializes the optimizer from the weights; --finetune also "
            "starts at iteration 0",
        )


def check_tokens(tokens: int | None, arguments: JobArguments, folder: Path) -> None:
    """Refuse a vocabulary without rows for some tokens of the checkpoint; padding rows may be absent.

    Args:
        tokens: the checkpoint's number of tokens, without padding; None if it is unknown.
        arguments: the arguments of the running job.
        folder: the checkpoint's folder.

    Raises:
        ModelMismatchError: tokens have no row.
    """
    rows = arguments.padded_vocab_size
    if tokens is not None and rows is not None and rows < tokens:
        raise ModelMismatchError(
            "the model's vocabulary is smaller than the checkpoint's: tokens with their optimizer state would be lost",
            found=quantity(tokens, "token"),
            expected=f"at most {rows}, padding included",
            where=str(folder),
            hint="resume with the tokenizer, or the --vocab-size, that the checkpoint was written with",
        )


def check_adapters(checkpoint: CheckpointView, running: ParallelLayout, arguments: JobArguments) -> None:
    """Refuse adapters that their own loop would load wrongly under another tensor parallel size.

    Raises:
        UnsupportedCheckpointError: the checkpoint has such adapters.
    """
    moved = "tensor" in checkpoint.job.layout.unknown or checkpoint.job.layout.tensor != running.tensor
    if moved and (wrong := size_ordered_adapters(checkpoint, arguments)):
        raise UnsupportedCheckpointError(
            f"{loop_of(wrong)} reads the rows of these adapters wrongly under another tensor parallel size",
            found=f"{join_some(wrong, 2)}, under TP{running.tensor}",
            expected=f"TP{checkpoint.job.layout.tensor}, as they were saved",
            where=str(checkpoint.files.folder),
            hint="keep the size; to write them for peft in the right order: mcore-ckpt convert SRC DST --to hf",
        )


def check_kinds(checkpoint: CheckpointView, shard: Shard) -> None:
    """Refuse an optimizer that keeps other state for a parameter than the one that wrote the checkpoint.

    Raises:
        ModelMismatchError: the optimizer needs state that is not stored, or stored state would be dropped.
    """
    state = checkpoint.optimizer.state()
    with_master = {kind for kind in state.carried_kinds if state.logical_tensor(kind, shard.name) is not None}
    stored = with_master - {FP32_PARAM}
    needed = set(shard.kinds)
    is_masters_only = with_master == set(state.carried_kinds) == {FP32_PARAM}
    if stored != needed and (stored or is_masters_only):
        where = f"{shard.name}, {checkpoint.files.folder}"
        raise another_kind_of_optimizer(f"{_list_kinds(stored)} of this parameter", _list_kinds(needed), where)


def _list_kinds(kinds: set[str]) -> str:
    return " and ".join(sorted(kinds)) or "the master alone"


def another_kind_of_optimizer(found: str, expected: str, where: str) -> ModelMismatchError:
    """Make the error for a checkpoint whose optimizer is of another kind than the running one."""
    return ModelMismatchError(
        "the checkpoint was written by another kind of optimizer than the running one",
        found=found,
        expected=expected,
        where=where,
        hint="resume with the checkpoint's own --optimizer and --sgd-momentum (to see them: mcore-ckpt inspect PATH), "
        "or with --no-load-optim: one optimizer's state cannot be computed from another's",
    )


def check_precision(checkpoint: CheckpointView, shard: Shard) -> None:
    """Refuse weights in another precision than the live ones: masters could not be verified by them.

    Raises:
        ModelMismatchError: the precision differs.
    """
    stored = checkpoint.logical_tensor(WEIGHT, shard.name)
    parameter = shard.live.parameter
    if (
        stored is None
        or quantization_check(parameter) is not None
        or checkpoint.optimizer.masters_are_derived(shard.name)
    ):
        return
    live = str(parameter.dtype).removeprefix("torch.")
    if stored.dtype in _ROUNDED and live != stored.dtype:
        raise ModelMismatchError(
            "the running job uses another precision than the checkpoint",
            found=f"{stored.dtype}",
            expected=live,
            where=f"{shard.name}, {checkpoint.files.folder}",
            hint=f"resume with {_ROUNDED[stored.dtype]}, as it was written; or with --no-load-optim, which "
            "initializes the optimizer from the weights",
        )


def check_stored_once(checkpoint: CheckpointView) -> None:
    """Refuse a checkpoint in which elements are stored more than once.

    Raises:
        UnreadableCheckpointError: elements are stored more than once.
    """
    index = checkpoint.files.stored_index()
    if index is not None and (overlapping := index.overlapping):
        raise UnreadableCheckpointError(
            "the checkpoint stores elements more than once",
            found=f"overlapping chunks of {join_some(sorted(overlapping), 3)}",
            where=str(checkpoint.files.folder),
            hint="its index was edited, or mixes several checkpoints: use another iteration",
        )


def check_lost(checkpoint: CheckpointView) -> None:
    """Refuse a checkpoint that Megatron itself wrote with lost elements.

    Raises:
        ProofError: optimizer state is lost; the message lists all of it.
    """
    lost = checkpoint.optimizer.state().lost_elements()
    if lost:
        raise ProofError(
            "Megatron wrote this fully_reshardable optimizer state shifted; most of it can be repaired, but not all",
            found=f"{quantity(sum(lost.values()), 'element')} in no slot: "
            + ", ".join(f"{count} of {name}" for name, count in lost.items()),
            where=str(checkpoint.files.folder),
            hint="resume from an iteration saved without --dist-ckpt-optim-fully-reshardable, or set "
            f"{ACCEPT_LOST.name}=1: lost masters are then taken from the weights, and their moments are zero",
        )


def verify_checksums(checkpoint: CheckpointView, rank: int, ranks: int) -> None:
    """Compare the checksums of this rank's share of all records.

    Raises:
        UnreadableCheckpointError: a checksum differs.
    """
    for number, (file, offset, length) in enumerate(sorted(set(checkpoint.files.archives()))):
        if number % ranks == rank:
            TorchArchive(checkpoint.files.reader, file, offset, length).verify_checksums()
