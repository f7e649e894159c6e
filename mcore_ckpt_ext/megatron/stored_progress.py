"""Checks that a checkpoint states how far its run was, which Megatron's own loop expects.

Source: `load_checkpoint` (megatron/training/checkpointing.py) and `OptimizerParamScheduler.load_state_dict`
(megatron/core/optimizer_param_scheduler.py), core_v0.7.0 to 0.19.2 and the development head of August 2026. Without
`iteration` the program ends with exit code 0; without `checkpoint_version` the weights count as those of version 0,
whose queries, keys and values are in another order; an entry that the scheduler lacks is a KeyError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mcore_ckpt_ext.collectives import refusal_text
from mcore_ckpt_ext.errors import ResumeRefusedError
from mcore_ckpt_ext.formats.common_state import SCHEDULERS
from mcore_ckpt_ext.formats.legacy.reader import NAME as LEGACY
from mcore_ckpt_ext.formats.registry import format_of
from mcore_ckpt_ext.formats.zarr.reader import NAME as ZARR
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.storage.checkpoint_dirs import RELEASE

_ITERATION = "iteration"
_VERSION = "checkpoint_version"
_SCHEDULE = "opt_param_scheduler"
# Each entry under all names that Megatron accepts, the present one last.
_SCHEDULE_ENTRIES = (
    ("start_lr", "max_lr"),
    ("min_lr",),
    ("warmup_iter", "warmup_steps", "lr_warmup_steps"),
    ("end_iter", "decay_steps", "lr_decay_steps"),
    ("decay_style", "lr_decay_style"),
    ("num_iters", "num_steps"),
)
_WEIGHT_DECAY_ENTRIES = ("end_wd", "wd_incr_steps", "wd_incr_style")


def missing_progress(session: LoadSession) -> tuple[str, ...]:
    """Return the entries that Megatron's own loop needs and a checkpoint lacks.

    Returns:
        Their names; none for formats that this package presents to Megatron with all of them. A release, as converters
        write it, needs no more than the version.

    Raises:
        CheckpointError: the checkpoint is unreadable.
    """
    stored = format_of(session.folder, session.index)
    if stored is None or not (stored.is_loaded_as_stored or stored.name in (LEGACY, ZARR)):
        return ()
    missing = tuple(_missing_keys(session.checkpoint.job.common()))
    if session.folder.name == RELEASE:
        return tuple(name for name in missing if name == _VERSION)
    # A save without the optimizer is without the schedule, too: that it has no optimizer is the reason to name.
    if session.checkpoint.job.arguments().raw.get("no_save_optim"):
        return tuple(name for name in missing if name in (_VERSION, _ITERATION))
    return missing


def _missing_keys(common: Mapping[str, Any]) -> Iterator[str]:
    if _ITERATION not in common and "total_iters" not in common:
        yield _ITERATION
    if _VERSION not in common:
        yield _VERSION
    key = next((key for key in SCHEDULERS if key in common), _SCHEDULE)
    schedule = common.get(key)
    if not isinstance(schedule, Mapping):
        yield _SCHEDULE
        return
    for names in _SCHEDULE_ENTRIES:
        if not any(name in schedule for name in names):
            yield f"{key}.{names[-1]}"
    if "start_wd" in schedule:
        yield from (f"{key}.{name}" for name in _WEIGHT_DECAY_ENTRIES if name not in schedule)


def check_progress(missing: Sequence[str], arguments: Any, where: str, *, has_scheduler: bool) -> None:
    """Refuse a checkpoint that does not state how far its run was.

    Args:
        missing: the entries that it lacks; see `missing_progress`.
        arguments: Megatron's arguments; with `--finetune`, a new run begins.
        where: the run folder.
        has_scheduler: whether the state of a learning rate scheduler is loaded.

    Raises:
        ResumeRefusedError: an entry is missing that Megatron needs.
    """
    starts_anew = bool(getattr(arguments, "finetune", False))
    needed = [
        name for name in missing if name == _VERSION or (not starts_anew if name == _ITERATION else has_scheduler)
    ]
    if not needed:
        return
    if all(name.startswith(SCHEDULERS) for name in needed):
        hint = "--no-load-optim starts with the schedule of the command line, and without the optimizer"
    else:
        hint = "use another iteration (--ckpt-step)"
    raise ResumeRefusedError(
        refusal_text("looking at the progress of the run", "the checkpoint does not say how far its run was"),
        found=f"no {' and no '.join(needed)} in its common state",
        expected="what Megatron writes with every save",
        where=where,
        hint=hint,
    )
