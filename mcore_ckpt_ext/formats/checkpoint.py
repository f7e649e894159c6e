"""Opens a checkpoint of any format by its path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from mcore_ckpt_ext.errors import CheckpointError, ProofError, UnsupportedCheckpointError, reraise_as_unreadable
from mcore_ckpt_ext.formats.adapter_only import adapters_on_model, has_adapters_alone
from mcore_ckpt_ext.formats.backend import CONFIG_FILE, sharded_backend
from mcore_ckpt_ext.formats.description import refuse_facts
from mcore_ckpt_ext.formats.lazy_tensor import TensorHandle
from mcore_ckpt_ext.formats.open_options import OpenOptions
from mcore_ckpt_ext.formats.registry import FORMATS, format_of
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.facts import NOTHING, Facts
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.model_space.names import LayerSpec
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_folder, no_checkpoint_error
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE, RECORDS_SUFFIX, FolderIndex
from mcore_ckpt_ext.storage.file_digests import check_digests
from mcore_ckpt_ext.storage.paths import as_path

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.family import Family

__all__ = ["Checkpoint", "TensorHandle", "open_checkpoint"]

Checkpoint: TypeAlias = CheckpointView
"""The public name of an open checkpoint."""


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    order_sources: Sequence[ParameterOrder] = (),
    family: Family | None = None,
    transformer_impl: str = LayerSpec.TRANSFORMER_ENGINE.value,
    facts: Facts = NOTHING,
    weights: str | os.PathLike[str] | None = None,
    index: FolderIndex | None = None,
) -> CheckpointView:
    """Open a checkpoint; only metadata is read.

    Args:
        path: a run folder (its newest iteration is opened), an `iter_XXXXXXX` or `release` folder,
            a `canonical` folder, a Hugging Face folder, or a folder saved by ColossalAI's Booster.
        order_sources: parameter orders to try when the packing of the gradient buffers is recovered.
        family: the family of a Hugging Face folder if its `config.json` does not name a supported one.
        transformer_impl: the layer spec whose parameter names are used for a Hugging Face folder.
        facts: properties of the job that wrote a checkpoint without Megatron's arguments.
        weights: the folder of the weights, any path as above, if the checkpoint contains only an optimizer;
            samples are compared to check that they belong together. If the checkpoint contains only adapters,
            the folder of their model.
        index: the index of the iteration folder, if it has been used before; it is then not read again. Without
            other options, the same checkpoint is returned again.

    Raises:
        UsageError: `facts` are passed for a checkpoint that describes its job, or contradict its index; or
            `weights` are passed for a checkpoint that contains weights.
        ProofError: the weights do not belong to this optimizer.
        UnreadableCheckpointError: there is no finished checkpoint.
        UnsupportedCheckpointError: this version cannot read the checkpoint.

    Example:
        >>> checkpoint = open_checkpoint("run")
        >>> checkpoint.job.iteration(), str(checkpoint.job.layout), checkpoint.optimizer.format()
        (4, 'TP2 x PP2 x DP2', 'dp_reshardable')
        >>> checkpoint.kinds()
        ('weight', 'fp32_param', 'exp_avg', 'exp_avg_sq')
        >>> handle = checkpoint.tensor("exp_avg", "decoder.layers.3.mlp.linear_fc1.weight")
        >>> handle.shape, handle.dtype, handle.read().ndim
        ((128, 32), torch.float32, 2)
    """
    with reraise_as_unreadable(path):
        folder = iteration_folder(as_path(path))
        stored = index if index is not None and index.is_of(folder) else FolderIndex(folder)
        options = OpenOptions(order_sources, family, transformer_impl, facts, index=stored)
        return _open(stored, options) if weights is None else _open_with_weights(stored, options, weights)


def _open(stored: FolderIndex, options: OpenOptions) -> CheckpointView:
    """Open a checkpoint without external weights, once for each index if there are no options."""
    folder = stored.folder
    checkpoint_format = format_of(folder, stored)
    if not stored.is_checked:
        check_digests(folder)
        stored.is_checked = True
    if checkpoint_format is None:
        raise _unknown(folder)
    if options.facts != NOTHING and not checkpoint_format.takes_facts:
        refuse_facts(options.facts, folder)
    if options != OpenOptions(index=stored):
        return checkpoint_format.open(folder, options).view
    if stored.checkpoint is None:
        stored.checkpoint = checkpoint_format.open(folder, options).view
    opened: CheckpointView = stored.checkpoint
    return opened


def _open_with_weights(stored: FolderIndex, options: OpenOptions, weights: str | os.PathLike[str]) -> CheckpointView:
    """Open an optimizer with the weights at a path, or adapters with their model."""
    checkpoint_format = format_of(stored.folder, stored)
    if checkpoint_format is not None and checkpoint_format.is_adapter_folder:
        model = open_checkpoint(weights, family=options.family)
        return checkpoint_format.open(stored.folder, replace(options, model=model)).view
    source = open_checkpoint(weights, family=options.family, transformer_impl=options.transformer_impl)
    try:
        return _with_weights(stored, source, options.order_sources, options.facts)
    except ProofError:
        # The optimizer may use the parameter names of the other layer spec.
        other = source.model.other_layer_spec
        if other is None:
            raise
        source = open_checkpoint(weights, family=options.family, transformer_impl=other)
        return _with_weights(stored, source, options.order_sources, options.facts)


def _with_weights(
    stored: FolderIndex, source: CheckpointView, order_sources: Sequence[ParameterOrder], facts: Facts
) -> CheckpointView:
    checkpoint = open_checkpoint(stored.folder, order_sources=order_sources, facts=facts, index=stored)
    if has_adapters_alone(checkpoint):
        return adapters_on_model(checkpoint, source)
    return checkpoint.format.with_weights_of(source)


def _unknown(folder: Path) -> CheckpointError:
    """Return the error for a folder whose format is not recognized.

    Raises:
        UnreadableCheckpointError: Megatron did not finish the checkpoint.
    """
    if not any(path.suffix == RECORDS_SUFFIX or path.name in (CONFIG_FILE, METADATA_FILE) for path in folder.iterdir()):
        return no_checkpoint_error(folder)
    return UnsupportedCheckpointError(
        "this version cannot read the checkpoint's format",
        found=sharded_backend(folder),
        expected=" or ".join(supported.name for supported in FORMATS),
        where=str(folder),
        hint="stock Megatron resumes this format; to convert it, save once with --ckpt-format torch_dist",
    )
