"""Opening a checkpoint: from a user's path to the one interface of all formats."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from mcore_ckpt_ext.errors import ProofError, UnsupportedCheckpointError, interpreting
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.formats.adapters_alone import for_model, has_adapters_alone
from mcore_ckpt_ext.formats.backend import CONFIG_FILE, sharded_backend
from mcore_ckpt_ext.formats.canonical.reader import CanonicalCheckpoint, is_canonical
from mcore_ckpt_ext.formats.colossalai.reader import ColossalAICheckpoint, is_colossalai
from mcore_ckpt_ext.formats.description import refuse_facts
from mcore_ckpt_ext.formats.fsdp.reader import NAME as FSDP_DTENSOR
from mcore_ckpt_ext.formats.fsdp.reader import FsdpCheckpoint
from mcore_ckpt_ext.formats.handle import TensorHandle
from mcore_ckpt_ext.formats.hugging_face.folder import is_huggingface, is_peft
from mcore_ckpt_ext.formats.hugging_face.model import TRANSFORMER_ENGINE
from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint
from mcore_ckpt_ext.formats.legacy.reader import LegacyCheckpoint, is_legacy
from mcore_ckpt_ext.formats.nemo.reader import NemoCheckpoint, is_nemo
from mcore_ckpt_ext.formats.peft.reader import PeftCheckpoint
from mcore_ckpt_ext.formats.plain_dcp import plain_backend
from mcore_ckpt_ext.formats.reader import FormatReader
from mcore_ckpt_ext.formats.torch_dcp.reader import NAME as TORCH_DCP
from mcore_ckpt_ext.formats.torch_dcp.reader import TorchDcpCheckpoint
from mcore_ckpt_ext.formats.torch_dist.reader import NAME as TORCH_DIST
from mcore_ckpt_ext.formats.torch_dist.reader import TorchDistCheckpoint
from mcore_ckpt_ext.formats.verl.reader import VerlCheckpoint, is_verl
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.zarr.reader import NAME as ZARR
from mcore_ckpt_ext.formats.zarr.reader import ZarrCheckpoint
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.loops.facts import NOTHING, Facts
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_folder, no_checkpoint
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE, RECORDS_SUFFIX, lent_of
from mcore_ckpt_ext.storage.file_digests import check_digests
from mcore_ckpt_ext.storage.paths import as_path

__all__ = ["Checkpoint", "TensorHandle", "open_checkpoint"]

Checkpoint: TypeAlias = CheckpointView
"""The public name of an open checkpoint."""

_BACKENDS: dict[str, type[TorchDistCheckpoint]] = {
    TORCH_DIST: TorchDistCheckpoint,
    ZARR: ZarrCheckpoint,
    FSDP_DTENSOR: FsdpCheckpoint,
    TORCH_DCP: TorchDcpCheckpoint,
}


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    witnesses: Sequence[ParameterOrder] = (),
    family: Family | None = None,
    transformer_impl: str = TRANSFORMER_ENGINE,
    facts: Facts = NOTHING,
    weights: str | os.PathLike[str] | None = None,
) -> CheckpointView:
    """Open a checkpoint; nothing but metadata is read.

    Args:
        path: a run folder (its newest iteration is taken), an `iter_XXXXXXX` or `release` folder,
            a folder in `canonical`, one of Hugging Face's, or one that ColossalAI's Booster saved.
        witnesses: parameter orders to try when the packing of the gradient buffers is recovered.
        family: the family of a Hugging Face folder whose `config.json` names no known one.
        transformer_impl: the layer spec whose names a Hugging Face folder is read under.
        facts: what you know of the job that wrote a checkpoint without Megatron's arguments.
        weights: where the weights lie, if the checkpoint holds an optimizer alone: any path as above. Whether they
            belong to it is then looked at here, by samples. Of adapters alone, the model that they are for.

    Raises:
        UsageError: facts are given of a checkpoint that describes its job itself, or they contradict its index; or
            weights are given of one that has them.
        ProofError: the weights are not those of this optimizer.
        UnreadableCheckpointError: there is no finished checkpoint.
        UnsupportedCheckpointError: this version does not read its kind.

    Example:
        >>> checkpoint = open_checkpoint("run")
        >>> checkpoint.iteration, str(checkpoint.layout), checkpoint.optimizer_format
        (4, 'TP2 x PP2 x DP2', 'dp_reshardable')
        >>> checkpoint.kinds()
        ('weight', 'fp32_param', 'exp_avg', 'exp_avg_sq')
        >>> handle = checkpoint.tensor("exp_avg", "decoder.layers.3.mlp.linear_fc1.weight")
        >>> handle.shape, handle.dtype, handle.read().ndim
        ((128, 32), torch.float32, 2)
    """
    with interpreting(path):
        folder = iteration_folder(as_path(path))
        if weights is not None and is_peft(folder):
            return PeftCheckpoint(folder, open_checkpoint(weights, family=family), family).view
        if weights is not None:
            lender = open_checkpoint(weights, family=family, transformer_impl=transformer_impl)
            try:
                return _with_weights(folder, lender, witnesses, facts)
            except ProofError:
                # The optimizer may name its parameters as the other layer spec does.
                other = lender.format_reader.other_layer_spec
                if other is None:
                    raise
                lender = open_checkpoint(weights, family=family, transformer_impl=other)
                return _with_weights(folder, lender, witnesses, facts)
        if lent_of(folder) is None:  # of what another rank has read, that rank has compared the digests
            check_digests(folder)
        if facts != NOTHING and not _may_lack_arguments(folder):
            refuse_facts(facts, folder)
        if is_colossalai(folder):
            return ColossalAICheckpoint(folder, witnesses, family=family, transformer_impl=transformer_impl).view
        if is_huggingface(folder):
            return HuggingFaceCheckpoint(folder, witnesses, family=family, transformer_impl=transformer_impl).view
        return _open(folder, witnesses, facts).view


def _with_weights(
    folder: Path, lender: CheckpointView, witnesses: Sequence[ParameterOrder], facts: Facts
) -> CheckpointView:
    checkpoint = open_checkpoint(folder, witnesses=witnesses, facts=facts)
    if has_adapters_alone(checkpoint):
        return for_model(checkpoint, lender)
    return checkpoint.format_reader.with_weights_of(lender).view


def _may_lack_arguments(folder: Path) -> bool:
    return not (is_colossalai(folder) or is_huggingface(folder) or is_canonical(folder) or is_legacy(folder))


def _open(folder: Path, witnesses: Sequence[ParameterOrder], facts: Facts) -> FormatReader:
    if is_canonical(folder):
        return CanonicalCheckpoint(folder, witnesses)
    if is_legacy(folder):
        return LegacyCheckpoint(folder, witnesses)
    if is_nemo(folder):
        return NemoCheckpoint(folder, witnesses, facts)
    if is_verl(folder):
        return VerlCheckpoint(folder, witnesses, facts)
    if not any(path.suffix == RECORDS_SUFFIX or path.name in (CONFIG_FILE, METADATA_FILE) for path in folder.iterdir()):
        raise no_checkpoint(folder)
    backend = plain_backend(folder) or sharded_backend(folder)
    if backend not in _BACKENDS:
        raise UnsupportedCheckpointError(
            "the checkpoint's format is not read by this version",
            found=backend,
            expected=" or ".join((*_BACKENDS, "legacy files", "a Hugging Face or canonical folder")),
            where=str(folder),
            helps="Megatron itself resumes what it wrote in this format; to convert it, save once with "
            "--ckpt-format torch_dist",
        )
    return _BACKENDS[backend](folder, witnesses, facts)
