"""Accounts for every key of a conversion's source: it is converted, implied, or listed with its size."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError, format_bytes, join_some, quantity
from mcore_ckpt_ext.formats.accounts import Account, account_of, together
from mcore_ckpt_ext.formats.canonical.options import Canonical
from mcore_ckpt_ext.formats.unread_state import UnreadState, is_of_optimizer
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.views import without_optimizer
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ, FP32_PARAM
from mcore_ckpt_ext.operations.coverage import check_parameters_with_state, raise_first_contradiction
from mcore_ckpt_ext.targets import Target

OPTIMIZER = "optimizer"
"""The word for all of an optimizer's state in `--drop`."""

# The kinds of `DistributedOptimizer` with Adam, for which `legacy` files are written.
_ADAM = {FP32_PARAM, EXP_AVG, EXP_AVG_SQ}
_NO_PLACE = "Hugging Face folders cannot store it"
_MERGED = "it belongs to the model before merging"
_DROPPED = "dropped, as you asked"


def resolve_dropped_state(
    checkpoint: CheckpointView, target: Target, drop: Collection[str]
) -> tuple[CheckpointView, Account]:
    """Return the checkpoint without dropped state, and what the conversion does with each stored key.

    Args:
        checkpoint: the source.
        target: the format to write.
        drop: kinds of optimizer state that the user gives up; `optimizer` for all of it.

    Raises:
        UnsupportedCheckpointError: optimizer state would be lost.
        UnreadableCheckpointError: some state is missing already, or belongs to no parameter.
        UsageError: a kind to drop does not occur.
    """
    merged_from = checkpoint.composition.merged_from
    if drop and (merged_from or target.is_model_folder):
        output = "merged model" if merged_from else "Hugging Face folder"
        raise UsageError(f"--drop has no effect: a {output} has no optimizer", found=_spell_option(drop))
    if merged_from:
        return checkpoint, together(
            account_of(source, leaves_out=is_of_optimizer, why=_MERGED) for source in merged_from
        )
    if target.is_model_folder:
        if target.weights_alone and checkpoint.optimizer.format():
            return checkpoint, account_of(checkpoint, leaves_out=is_of_optimizer, why=_NO_PLACE)
        return checkpoint, account_of(checkpoint)
    account = account_of(checkpoint)
    unread = account.not_looked_at
    _check_drop(checkpoint, unread, drop)
    if OPTIMIZER in drop:
        if checkpoint.optimizer.format():
            account = account_of(checkpoint, leaves_out=is_of_optimizer, why=_DROPPED)
        return without_optimizer(checkpoint), account
    lost = [item for item in unread if item.is_of_optimizer_state and item.kind not in drop]
    if lost:
        raise UnsupportedCheckpointError(
            "the checkpoint has unsupported optimizer state that would be lost",
            found=format_items(lost),
            where=str(checkpoint.files.folder),
            hint=f"to convert without it, --drop {' '.join(dict.fromkeys(item.kind for item in lost))}; for the "
            f"weights alone, --drop {OPTIMIZER}",
        )
    if checkpoint.optimizer.format() is not None:
        raise_first_contradiction(checkpoint, check_parameters_with_state(checkpoint))
        _check_can_be_held(checkpoint, target)
    return checkpoint, account


def format_items(items: Iterable[UnreadState]) -> str:
    """Format the first few keys with their sizes."""
    return join_some([f"{item.key} ({format_bytes(item.nbytes)})" for item in items])


def _check_drop(checkpoint: CheckpointView, unread: Collection[UnreadState], drop: Collection[str]) -> None:
    there = dict.fromkeys(item.kind for item in unread if item.is_of_optimizer_state)
    if checkpoint.optimizer.format() or there:
        there[OPTIMIZER] = None
    unknown = [kind for kind in drop if kind not in there]
    if unknown:
        raise UsageError(
            "--drop accepts only state that cannot be converted",
            found=_spell_option(unknown),
            expected=", ".join(there) or "nothing",
            where=str(checkpoint.files.folder),
            hint=f"leave the option out; for the weights alone, --drop {OPTIMIZER}",
        )


def _check_can_be_held(checkpoint: CheckpointView, target: Target) -> None:
    """Refuse optimizer state that the target's optimizer cannot hold.

    All parameters of a DistributedOptimizer have the same kinds of state, in legacy files those of Adam. Legacy files
    of optimizers of whole parameters hold all state.

    Raises:
        UnsupportedCheckpointError: there is other state, some state lacks parameters, or there are no parameter groups.
    """
    state = checkpoint.optimizer.state()
    names = {kind: set(state.names(kind)) for kind in state.kinds}
    whole = target.whole_states and checkpoint.optimizer.chained_optimizer_settings()
    distributed = {name for name in state.names() if state.is_distributed(name) and not whole}
    held = [names[kind] & distributed for kind in state.carried_kinds if names[kind] & distributed]
    even = all(of_kind == distributed for of_kind in held)
    adam = even and (not distributed or {kind for kind in names if names[kind] & distributed} >= _ADAM)
    possible = adam if target.for_adam else even or target.for_any_optimizer
    if checkpoint.optimizer.param_groups() and possible:
        return
    summary = f"{checkpoint.optimizer.format()}: " + ", ".join(
        f"{k} of {quantity(len(names[k]), 'parameter')}" for k in names
    )
    raise UnsupportedCheckpointError(
        f"this optimizer cannot be written as {target.name}: it would be lost",
        found=summary if checkpoint.optimizer.param_groups() else f"{summary}; no parameter groups",
        expected=f"{', '.join(sorted(_ADAM))} of every parameter, as Megatron has them with Adam",
        where=str(checkpoint.files.folder),
        hint=f"--to {Canonical.name} keeps all of it; for the weights alone, --drop {OPTIMIZER}",
    )


def _spell_option(drop: Iterable[str]) -> str:
    return f"--drop {' '.join(drop)}"
