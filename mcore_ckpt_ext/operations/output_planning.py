"""Laying out what a conversion writes: from a source and a target to files, records and notes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError, UsageError
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.formats.adapter_order import about_order
from mcore_ckpt_ext.formats.adapters_alone import check_names
from mcore_ckpt_ext.formats.canonical.reader import canonical_output
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.fsdp.writer import FsdpTarget
from mcore_ckpt_ext.formats.hugging_face.folder import (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER_FOLDER,
    companions,
    refused_companions,
)
from mcore_ckpt_ext.formats.hugging_face.images import text_beside, with_images
from mcore_ckpt_ext.formats.hugging_face.writer import HuggingFaceTarget
from mcore_ckpt_ext.formats.legacy.writer import LegacyTarget
from mcore_ckpt_ext.formats.peft.writer import PeftTarget
from mcore_ckpt_ext.formats.portable_state import without_fsdp
from mcore_ckpt_ext.formats.steps import check_step
from mcore_ckpt_ext.formats.torch_dist.bridge_files import run_config_file, train_state
from mcore_ckpt_ext.formats.torch_dist.writer import TorchDistTarget
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.loops.bridge import LATEST_TRAIN_STATE, RUN_CONFIG, TRAIN_STATE
from mcore_ckpt_ext.model_space.adapters import is_adapter
from mcore_ckpt_ext.model_space.names import of_experts
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.companion_notes import companion_notes
from mcore_ckpt_ext.planning.write_plan import Output, OutputFile
from mcore_ckpt_ext.storage.checkpoint_dirs import RELEASE, TRACKER_FILE, iteration_name
from mcore_ckpt_ext.storage.paths import as_path, is_remote
from mcore_ckpt_ext.targets import (
    Canonical,
    FsdpDtensor,
    HuggingFace,
    Legacy,
    Target,
    TorchDist,
    installed_version,
    version_number,
)


@dataclass(frozen=True)
class LaidOut:
    """What is to be written, below the destination.

    Attributes:
        output: the files, what goes into them, and the notes for whoever reads them.
        folder: the iteration folder among them; empty where the destination itself is the checkpoint.
        kinds: the kinds that can be read back.
        left_out: names of the source's weights that the format has no place for.
        reads_optimizer: more than the weights is taken from the source.
        reads_back: opens what was written.
    """

    output: Output
    folder: str
    kinds: Sequence[str]
    left_out: Sequence[str] = ()
    reads_optimizer: bool = True
    reads_back: Callable[[Path], CheckpointView] = open_checkpoint


def lay_out(checkpoint: CheckpointView, target: Target, family: Family | None) -> LaidOut:
    """Lay out the files of a conversion.

    Raises:
        UnsupportedCheckpointError: the format cannot hold this checkpoint.
    """
    _check_vocabulary(checkpoint, getattr(target, "vocab_size", None))
    if isinstance(target, HuggingFace):
        return _hugging_face(checkpoint, target, family)
    expert = getattr(target, "expert_model_parallel_size", None)
    if expert is not None and expert > 1 and not any(map(of_experts, checkpoint.names(WEIGHT))):
        raise UsageError(
            "the model has no experts to spread over expert-parallel ranks",
            found=f"--expert-model-parallel-size {expert}", where=str(checkpoint.folder), helps="leave the option out",
        )  # fmt: skip
    check_step(checkpoint)
    kinds, notices = checkpoint.carried_kinds(), [*checkpoint.notices(), *about_order(checkpoint)]
    if isinstance(target, Canonical):
        return LaidOut(_noting(canonical_output(checkpoint), notices), "", kinds)
    output = _files_of_iteration(checkpoint, target)
    output = _noting(output, [], _version_notes(target))
    folder = RELEASE if checkpoint.released else iteration_name(checkpoint.iteration)
    below = _below(_with_companions(_noting(output, notices), checkpoint), folder)
    if target.for_bridge and not checkpoint.released:
        below = replace(below, files=[*below.files, _file(LATEST_TRAIN_STATE, train_state(checkpoint), last=True)])
    return LaidOut(below, folder, kinds)


def _files_of_iteration(checkpoint: CheckpointView, target: TorchDist | Legacy | FsdpDtensor) -> Output:
    _check_buildable(checkpoint, target)
    check_names(checkpoint, target.name, for_bridge=target.for_bridge)
    if isinstance(target, FsdpDtensor):
        expert = target.expert_model_parallel_size
        experts_apart = checkpoint.experts_apart if expert is None else expert > 1
        return FsdpTarget(checkpoint, version_number(target.megatron_version), experts_apart).output()
    return _torch_dist(checkpoint, target) if isinstance(target, TorchDist) else _legacy(checkpoint, target)


def _check_vocabulary(checkpoint: CheckpointView, asked: int | None) -> None:
    """A vocabulary that is smaller than the source says would lose tokens; a larger one than it has invents them.

    Raises:
        UsageError: it is either.
    """
    if asked is not None and asked < (checkpoint.tokens or 0):
        raise UsageError(
            "the vocabulary would lose tokens", found=f"--vocab-size {asked}",
            expected=f"{checkpoint.tokens} or more: the source says that it has so many tokens",
            where=str(checkpoint.folder), helps="leave the option out",
        )  # fmt: skip
    if asked is not None and asked > (checkpoint.vocabulary_rows or asked):
        raise UsageError(
            "the vocabulary has fewer rows than that: the other tokens would be zeros", found=f"--vocab-size {asked}",
            expected=f"{checkpoint.vocabulary_rows} or less", where=str(checkpoint.folder),
            helps="name the tokenizer's own size; Megatron's padding is added to it",
        )  # fmt: skip


def _check_buildable(checkpoint: CheckpointView, target: TorchDist | Legacy | FsdpDtensor) -> None:
    """Refuse a model, of Hugging Face's or of the other layer spec, that the version that will read it cannot build.

    Raises:
        UnsupportedCheckpointError: it cannot.
    """
    version = version_number(target.megatron_version)
    if why := checkpoint.unbuildable(version):
        raise UnsupportedCheckpointError(
            "that version of Megatron builds no such model", found=why, where=str(checkpoint.folder),
            helps="write for an earlier one: --megatron-version 0.18.0",
        )  # fmt: skip


def _torch_dist(checkpoint: CheckpointView, target: TorchDist) -> Output:
    expert = target.expert_model_parallel_size
    experts_apart = checkpoint.experts_apart if expert is None else expert > 1
    version, for_bridge = version_number(target.megatron_version), target.loop == "bridge"
    written = TorchDistTarget(checkpoint, version, experts_apart, with_arguments=not for_bridge)
    if (own := checkpoint.format_reader.run_config()) is not None:
        return _beside(written.output(), _file(RUN_CONFIG, own.encode()))
    if not for_bridge:
        return written.output()
    run_config, notes = run_config_file(checkpoint, written.carries_random_states)
    return _noting(_beside(written.output(), run_config, _file(TRAIN_STATE, train_state(checkpoint))), notes)


def _beside(output: Output, *small: OutputFile) -> Output:
    return replace(output, files=[*small, *output.files])


def _file(name: str, content: bytes, last: bool = False) -> OutputFile:
    return OutputFile(name, len(content), ((0, content),), last=last)


def _legacy(checkpoint: CheckpointView, target: Legacy) -> Output:
    arguments = reader_arguments(checkpoint, target)
    if checkpoint.format_reader.has_norms_of_all_heads and (arguments.tensor_model_parallel_size or 1) > 1:
        raise UnsupportedCheckpointError(
            "it is not known how tensor-parallel ranks would hold the norms of this model's queries and keys",
            found="norms of all heads together, which Megatron Core does not have",
            where=str(checkpoint.folder),
            helps="convert --to torch_dist, which Megatron-Bridge reads under any layout",
        )
    if arguments.num_experts and arguments.add_bias_linear and (arguments.tensor_model_parallel_size or 1) > 1:
        raise UnsupportedCheckpointError(  # `TransformerConfig.__post_init__`, core_v0.12 to 0.19.2
            "Megatron shares no experts with biases among tensor-parallel ranks",
            found=f"--tensor-model-parallel-size {arguments.tensor_model_parallel_size}",
            where=str(checkpoint.folder),
            helps="leave the size out, or convert --to torch_dist, which a job reads under any layout",
        )
    return LegacyTarget(checkpoint, arguments, version_number(target.megatron_version)).output()


def _hugging_face(checkpoint: CheckpointView, target: HuggingFace, family: Family | None) -> LaidOut:
    if any(map(is_adapter, checkpoint.names(WEIGHT))):
        adapters = PeftTarget(checkpoint, target, family)
        return LaidOut(adapters.output(), "", (), adapters.left_out, False, adapters.read_back)
    merged = checkpoint.merger.messages if checkpoint.merger else ()
    if target.lora_alpha is not None and not merged:
        raise UsageError("the checkpoint has no adapters", found="--lora-alpha", helps="leave the option out")
    tokenizer = _tokenizer(target.tokenizer)
    layout = HuggingFaceTarget(checkpoint, target, family, tokenizer)
    spec = layout.fit.arguments.transformer_impl

    def reads_back(folder: Path) -> CheckpointView:
        written = open_checkpoint(folder, family=layout.fit.family, transformer_impl=spec)
        return text_beside(with_images(written)) if layout.sees else written

    small = {**checkpoint.companions(), **tokenizer}
    taken = {name: content for name, content in small.items() if name not in (CONFIG, GENERATION_CONFIG)}
    output = _noting(layout.output(), [*merged, *companion_notes(taken, checkpoint)])
    return LaidOut(output, "", (WEIGHT,), layout.left_out, target.kind != WEIGHT, reads_back)


def _tokenizer(path: str | os.PathLike[str] | None) -> dict[str, bytes]:
    """The small files in the folder that the user names.

    Raises:
        UnreadableCheckpointError: it has none.
    """
    if path is None:
        return {}
    found = companions(as_path(path))
    if not found:
        refused = "; ".join(f"{name}: {why}" for name, why in refused_companions(as_path(path)).items())
        there = is_remote(as_path(path)) or as_path(path).is_dir()
        raise UnreadableCheckpointError(
            "the folder holds no tokenizer" if there else "there is no such folder", found=refused or None,
            expected="the small files of a tokenizer or model, such as tokenizer.json or config.json", where=str(path),
            helps="name the folder of a tokenizer or model on this machine: --tokenizer PATH",
        )  # fmt: skip
    return found


def _noting(output: Output, notes: Sequence[str], before: Sequence[str] = ()) -> Output:
    return replace(output, notes=(*before, *output.notes, *notes))


def _version_notes(target: TorchDist | Legacy | FsdpDtensor) -> list[str]:
    """For which version the files are, where the user has named none: earlier ones may not read them."""
    if target.megatron_version is not None:
        return []
    return [f"written for Megatron {installed_version()}; for another: --megatron-version V"]


def _with_companions(output: Output, checkpoint: CheckpointView) -> Output:
    """The same, with the model's small files where Megatron keeps its tokenizer."""
    small = [_file(f"{TOKENIZER_FOLDER}/{name}", content) for name, content in checkpoint.companions().items()]
    notes = companion_notes(checkpoint.companions(), checkpoint)
    return replace(output, files=[*small, *output.files], notes=(*output.notes, *notes))


def _below(output: Output, folder: str) -> Output:
    """The same files in a folder of the destination, with the tracker file that names it."""
    files = [replace(file, name=f"{folder}/{file.name}") for file in output.files]
    named = folder if folder == "release" else str(int(folder.removeprefix("iter_")))
    files.append(_file(TRACKER_FILE, named.encode(), last=True))
    records = [replace(record, file=f"{folder}/{record.file}") for record in output.records]
    return replace(output, files=files, records=records)


# Arguments that say how layers are spread over pipeline ranks; they mean nothing for another number of ranks.
_SPREADING = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
)  # fmt: skip


def reader_arguments(checkpoint: CheckpointView, target: Legacy) -> JobArguments:
    """Megatron's arguments of the job that will read: the writer's, with another layout."""
    written, source = checkpoint.arguments, checkpoint.layout
    _check_layout_known(checkpoint, target)
    tensor = target.tensor_model_parallel_size or source.tensor
    vocabulary = target.vocab_size or checkpoint.vocabulary
    pipeline = target.pipeline_model_parallel_size or source.pipeline
    expert = target.expert_model_parallel_size or source.expert
    virtual = target.virtual_pipeline_model_parallel_size
    if virtual is None:
        virtual = source.virtual_pipeline if pipeline == source.pipeline else 1
    ranks = tensor * pipeline * source.context
    data = max(1, source.world // ranks)
    changes: dict[str, Any] = {}
    if pipeline != source.pipeline:
        changes |= {name: None for name in _SPREADING if written.is_known(name)}
    changes |= {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "transformer_pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": tensor,
        "data_parallel_size": data,
        "world_size": ranks * data,
        "padded_vocab_size": _padded_vocabulary(checkpoint, tensor, vocabulary),
        "ckpt_format": "torch",
        "use_dist_ckpt": False,
        "use_distributed_optimizer": not (checkpoint.optimizer_format and checkpoint.chain()),
        **without_fsdp(written),
    }
    return written.changed(**changes)


def _check_layout_known(checkpoint: CheckpointView, target: Legacy) -> None:
    """Refuse to take over a size from a source that does not tell it.

    Raises:
        UsageError: neither the source nor the user says it.
    """
    open_sizes = {
        "tensor": target.tensor_model_parallel_size,
        "pipeline": target.pipeline_model_parallel_size,
        "expert": target.expert_model_parallel_size,
    }
    missing = [name for name, size in open_sizes.items() if size is None and name in checkpoint.layout.unknown]
    if missing:
        raise UsageError(
            "the layout of the job that will read is not known: the source does not say its own",
            expected=", ".join(f"--{name}-model-parallel-size" for name in missing), where=str(checkpoint.folder),
            helps="name it",
        )  # fmt: skip


def _padded_vocabulary(checkpoint: CheckpointView, tensor: int, vocabulary: int | None) -> int:
    """Rows of the embedding: `_vocab_size_with_padding` (megatron/training/tokenizer/tokenizer.py, 0.7 to 0.19).

    Without the true size, which no checkpoint records, the stored one is kept, or padded further where it cannot be
    divided.
    """
    multiple = (checkpoint.arguments.make_vocab_size_divisible_by or 128) * tensor
    stored = checkpoint.vocabulary_rows or checkpoint.arguments.whole("padded_vocab_size")
    if vocabulary is None:
        return stored if stored % tensor == 0 else -(-stored // multiple) * multiple
    return -(-vocabulary // multiple) * multiple
