"""Presents checkpoints to `load_checkpoint` whose files stock Megatron cannot load by itself.

These are legacy checkpoints of another layout, zarr checkpoints if Megatron has no reader for them, torch_dist
checkpoints of 0.19 or later in an earlier Megatron, checkpoints of Megatron-FSDP (`fsdp_dtensor`) or torch's FSDP
(`torch_dcp`) in a job that does not use that FSDP, and Hugging Face folders (`sources.huggingface`).
Of a legacy checkpoint, stock Megatron opens the rank folder that its own layout names (`_load_base_checkpoint`,
checkpointing.py, core_v0.7.0 to 0.19.2): with `--ckpt-format torch` it refuses, otherwise it fails or, since 0.16,
silently loads half a model. For zarr, Megatron reports from 0.16 on that it has no strategy. It takes both FSDP formats
for `torch_dcp`, and requests none of their tensors (`_get_checkpoint_format`). Before 0.19 it requires `common.pt`
(`TorchCommonLoadStrategy.load_common`, dist_checkpointing/strategies/common.py, core_v0.7.0 to 0.18.2).
Within the scope that this module opens, `_load_base_checkpoint` returns this rank's part of the checkpoint as it would
read it from a legacy checkpoint of the running layout. Everything after it is stock.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt_ext.collectives import agree
from mcore_ckpt_ext.errors import ModelMismatchError, UnreadableCheckpointError, quantity
from mcore_ckpt_ext.formats.checkpoint import Checkpoint
from mcore_ckpt_ext.megatron.live.compatibility import check_names, name_map_for
from mcore_ckpt_ext.megatron.live.extra_states import FoundStates, states_for
from mcore_ckpt_ext.megatron.live.model import Chunks, LiveParameter, live_names, live_parameters, model_tensors
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.model_space.names import is_extra_state
from mcore_ckpt_ext.model_space.slices import Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.patching.log import announce, missing_extra_states_message
from mcore_ckpt_ext.patching.overrides import Scope, overridden
from mcore_ckpt_ext.planning.plan import TargetSlice, make_plan
from mcore_ckpt_ext.storage.dtypes import with_torch_dtypes

# `check_checkpoint_args` compares these; they follow from the tensor and pipeline parallel size.
_LAYOUT_ARGUMENTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
)


@contextmanager
def present(
    scope: Scope,
    session: LoadSession,
    chunks: Chunks,
    opened: Callable[[set[str]], Checkpoint] | None = None,
) -> Iterator[None]:
    """Present the checkpoint to the loads within this scope, after all ranks have read their parts.

    Args:
        scope: the globals of Megatron's checkpointing module.
        session: the folder to load.
        chunks: the unwrapped model chunks.
        opened: opens the checkpoint, given the names of the live model over all ranks; by default the session's.

    Raises:
        ResumeRefusedError: on every rank, if some rank's part is unavailable.
    """
    arguments = scope["get_args"]()
    names_of_ranks = agree("reading the live model", lambda: live_names(model_tensors(chunks)))
    live = {name for names in names_of_ranks for name in names}
    state: dict[str, Any] = {}
    releases: list[bool] = []

    def cut() -> tuple[int, int]:
        checkpoint = opened(live) if opened is not None else session.checkpoint
        rank_state, missing, unknown = _rank_state(checkpoint, chunks, arguments, live)
        state.update(rank_state)
        releases.append(checkpoint.job.is_release)
        return missing, unknown

    missing, unknown = map(sum, zip(*agree("cutting the weights", cut), strict=True))
    if missing:
        announce(missing_extra_states_message(missing))
    if unknown:
        announce(
            f"extra states of {quantity(unknown, 'module')} are of an unknown kind: they start empty, and fp8 "
            f"scaling is reinitialized"
        )

    def load_base_checkpoint(*_: Any, **__: Any) -> tuple[Any, ...]:
        if "set_loaded_iteration" in scope:  # since 0.16
            scope["set_loaded_iteration"](state["iteration"])
        return as_base_checkpoint(scope, state, session.folder, is_release=releases[0])

    with overridden(scope, _load_base_checkpoint=load_base_checkpoint), overridden(vars(arguments), no_load_rng=True):
        yield


def as_base_checkpoint(scope: Scope, state: dict[str, Any], folder: Path, *, is_release: bool) -> tuple[Any, ...]:
    """Return a state as the running `_load_base_checkpoint` returns that of a legacy checkpoint.

    `scope`: the globals of Megatron's checkpointing module.
    """
    fields = (state, str(folder), is_release)
    # Since 0.9, the kind of checkpoint is returned, too.
    return (*fields, scope["CheckpointType"].LEGACY) if "CheckpointType" in scope else fields


def _rank_state(
    checkpoint: Checkpoint, chunks: Chunks, arguments: Any, live: set[str]
) -> tuple[dict[str, Any], int, int]:
    """Return the content of this rank's `model_optim_rng.pt`, without optimizer and random state.

    Returns:
        The content; the number of extra states that the checkpoint lacks; the number of unknown ones.
    """
    try:
        spell = name_map_for(checkpoint, live)
        check_names(checkpoint, set(map(spell, live)))
        # A Hugging Face folder has no arguments: this job's arguments have been compared with its config.json.
        written = Namespace(**(vars(arguments) if checkpoint.format.is_model_folder else checkpoint.job.args))
        vars(written).update({name: getattr(arguments, name) for name in _LAYOUT_ARGUMENTS if hasattr(arguments, name)})
        described = live_parameters(chunks, spell)
        states = checkpoint.states.extra()
        models, extras = zip(*(_model_state(checkpoint, chunk, described, states) for chunk in chunks), strict=True)
        keys = ["model"] if len(models) == 1 else [f"model{number}" for number in range(len(models))]
        common = with_torch_dtypes({**checkpoint.job.common(), "args": written})
        state = {**common, **dict(zip(keys, models, strict=True))}
        return state, sum(len(extra.missing) for extra in extras), sum(len(extra.unknown) for extra in extras)
    finally:
        checkpoint.files.reader.close()


def _model_state(
    checkpoint: Checkpoint, chunk: Any, described: Mapping[int, LiveParameter], states: Mapping[str, Any]
) -> tuple[dict[str, Any], FoundStates]:
    """Return a `state_dict` for one model chunk.

    Entries that the checkpoint lacks keep their live values. `states`: the checkpoint's extra states.
    """
    state: dict[str, Any] = dict(chunk.state_dict(keep_vars=True))
    local = [name for name, value in state.items() if isinstance(value, torch.Tensor) and not is_extra_state(name)]
    for name in local:
        if id(state[name]) not in described:
            raise ModelMismatchError("the model has a tensor that its own sharded state dict does not list", where=name)
    tensors = [described[id(state[name])] for name in local]
    targets = [TargetSlice(WEIGHT, Slice.whole(live.regions), live.tensors, live.may_pad) for live in tensors]
    filled = [torch.empty(live.parameter.numel(), dtype=live.parameter.dtype, device="cpu") for live in tensors]
    checkpoint.files.transfer.execute(make_plan(targets, checkpoint), filled)
    if checkpoint.format.is_model_folder:
        _check_numbers(tensors, filled, str(checkpoint.files.folder))
    extra = states_for(state, dict(zip(local, tensors, strict=True)), states)
    values = {
        name: values.view(live.parameter.shape) for name, live, values in zip(local, tensors, filled, strict=True)
    }
    return state | values | dict(extra.states), extra


def _check_numbers(tensors: Sequence[LiveParameter], filled: Sequence[torch.Tensor], where: str) -> None:
    """Refuse weights that are not finite, since every loss would be NaN.

    Other checkpoints need no such check: their masters verify their weights.

    Raises:
        UnreadableCheckpointError: a weight is not finite.
    """
    for live, values in zip(tensors, filled, strict=True):
        # The sum of finite numbers may be infinite, but a non-finite number never gives a finite sum.
        if values.is_floating_point() and not values.sum(dtype=torch.float64).isfinite():
            wrong = int((~values.isfinite()).sum())
            if wrong:
                raise UnreadableCheckpointError(
                    "the initial weights are not finite",
                    found=f"NaN or infinite: {wrong:,} of {quantity(values.numel(), 'element')}",
                    where=f"{live.regions[0].name}, {where}",
                    hint="use another copy of the folder; if a job wrote it, its training had diverged",
                )
