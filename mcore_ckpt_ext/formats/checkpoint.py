"""Opening a checkpoint: from a user's path to the one interface of all formats."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from mcore_ckpt_ext.errors import CheckpointError, ProofError, UnsupportedCheckpointError, reraise_as_unreadable
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.formats.adapter_only import for_model, has_adapters_alone
from mcore_ckpt_ext.formats.backend import CONFIG_FILE, sharded_backend
from mcore_ckpt_ext.formats.description import refuse_facts
from mcore_ckpt_ext.formats.format import OpenOptions
from mcore_ckpt_ext.formats.hugging_face.model import TRANSFORMER_ENGINE
from mcore_ckpt_ext.formats.lazy_tensor import TensorHandle
from mcore_ckpt_ext.formats.registry import FORMATS, format_of
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.facts import NOTHING, Facts
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_folder, no_checkpoint
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE, RECORDS_SUFFIX, lent_of
from mcore_ckpt_ext.storage.file_digests import check_digests
from mcore_ckpt_ext.storage.paths import as_path

__all__ = ["Checkpoint", "TensorHandle", "open_checkpoint"]

Checkpoint: TypeAlias = CheckpointView
"""The public name of an open checkpoint."""


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    order_sources: Sequence[ParameterOrder] = (),
    family: Family | None = None,
    transformer_impl: str = TRANSFORMER_ENGINE,
    facts: Facts = NOTHING,
    weights: str | os.PathLike[str] | None = None,
) -> CheckpointView:
    """Open a checkpoint; nothing but metadata is read.

    Args:
        path: a run folder (its newest iteration is taken), an `iter_XXXXXXX` or `release` folder,
            a folder in `canonical`, one of Hugging Face's, or one that ColossalAI's Booster saved.
        order_sources: parameter orders to try when the packing of the gradient buffers is recovered.
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
    options = OpenOptions(order_sources, family, transformer_impl, facts)
    with reraise_as_unreadable(path):
        folder = iteration_folder(as_path(path))
        found = format_of(folder)
        if weights is not None and found is not None and found.is_adapter_folder:
            return found.open(folder, replace(options, model=open_checkpoint(weights, family=family))).view
        if weights is not None:
            lender = open_checkpoint(weights, family=family, transformer_impl=transformer_impl)
            try:
                return _with_weights(folder, lender, order_sources, facts)
            except ProofError:
                # The optimizer may name its parameters as the other layer spec does.
                other = lender.format_reader.other_layer_spec
                if other is None:
                    raise
                lender = open_checkpoint(weights, family=family, transformer_impl=other)
                return _with_weights(folder, lender, order_sources, facts)
        if lent_of(folder) is None:  # of what another rank has read, that rank has compared the digests
            check_digests(folder)
        if found is None:
            raise _unknown(folder)
        if facts != NOTHING and not found.takes_facts:
            refuse_facts(facts, folder)
        return found.open(folder, options).view


def _with_weights(
    folder: Path, lender: CheckpointView, order_sources: Sequence[ParameterOrder], facts: Facts
) -> CheckpointView:
    checkpoint = open_checkpoint(folder, order_sources=order_sources, facts=facts)
    if has_adapters_alone(checkpoint):
        return for_model(checkpoint, lender)
    return checkpoint.format_reader.with_weights_of(lender).view


def _unknown(folder: Path) -> CheckpointError:
    """The refusal of a folder that no format recognizes.

    Raises:
        UnreadableCheckpointError: Megatron did not finish it.
    """
    if not any(path.suffix == RECORDS_SUFFIX or path.name in (CONFIG_FILE, METADATA_FILE) for path in folder.iterdir()):
        return no_checkpoint(folder)
    return UnsupportedCheckpointError(
        "this version cannot read the checkpoint's format", found=sharded_backend(folder),
        expected=" or ".join(one.name for one in FORMATS), where=str(folder),
        hint="stock Megatron resumes this format; to convert it, save once with "
        "--ckpt-format torch_dist",
    )  # fmt: skip
