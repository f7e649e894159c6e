"""Before a resume: whether the checkpoint that it would take is whole, and if not, which one would do."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import ResumeRefusedError
from mcore_ckpt_ext.hooks.announce import announce, is_first_rank
from mcore_ckpt_ext.hooks.rebinding import rebound
from mcore_ckpt_ext.offline.whole import Standing, standing_of
from mcore_ckpt_ext.online.agreement import agreed
from mcore_ckpt_ext.settings import FALLBACK

_SHOWN = 3


@contextmanager
def taking_what_is_whole(scope: MutableMapping[str, Any], directory: str | None) -> Iterator[None]:
    """Have the load within this scope take the newest whole iteration, if the one it wants is not whole.

    `ckpt_step` outweighs the tracker in `load_checkpoint` and what it calls, but only once `read_metadata` has read it,
    which ends the job where it cannot (megatron/training/checkpointing.py, core_v0.8.0 to 0.19.2).

    Args:
        scope: the globals of Megatron's checkpointing module.
        directory: the run folder.

    Raises:
        ResumeRefusedError: on every rank, when another one is whole, but the user did not allow it to be taken.
    """
    arguments = scope["get_args"]()
    standing = agreed("looking for a whole checkpoint", lambda: _looked(arguments, directory))[0]
    if standing is None or not standing.problems:
        if standing is not None and standing.unfinished:
            names = ", ".join(map(str, sorted(standing.unfinished)))
            announce(f"iteration {names} was not finished; resuming from {standing.wanted}, which is whole")
        yield
        return
    if standing.newest_whole is None:
        yield  # nothing to choose from: the load itself finds out, and names what it misses
        return
    if not FALLBACK.chosen(arguments):
        raise _refusal(standing, str(directory))
    what = "; ".join(standing.problems[:_SHOWN])
    announce(f"{standing.wanted} is not whole ({what}); resuming from iteration {standing.newest_whole} instead")
    chosen = standing.newest_whole
    named = rebound(scope, read_metadata=lambda *_, **__: (chosen, False))
    with named, rebound(vars(arguments), ckpt_step=chosen):
        yield


def _looked(arguments: Any, directory: str | None) -> Standing | None:
    """Rank 0's look; a look by every rank would cost a big job's file system dearly."""
    served = directory and "://" not in str(directory) and hasattr(arguments, "ckpt_step")
    other_kind = getattr(arguments, "non_persistent_ckpt_type", None)
    if not served or other_kind or not is_first_rank() or not Path(str(directory)).is_dir():
        return None
    return standing_of(Path(str(directory)), arguments.ckpt_step or None)


def _refusal(standing: Standing, directory: str) -> ResumeRefusedError:
    found = "; ".join(standing.problems[:_SHOWN])
    if len(standing.problems) > _SHOWN:
        found += f"; and {len(standing.problems) - _SHOWN} more (mcore-ckpt verify)"
    number = standing.newest_whole
    by_hand = f"--ckpt-step {number}" if standing.has_tracker else f"writing {number} into the tracker file"
    helps = (
        f"iteration {number} is whole: {by_hand} takes it, "
        f"{FALLBACK.flag} (or {FALLBACK.name}=1) always takes the newest whole one"
    )
    return ResumeRefusedError(
        "mcore_ckpt_ext refused while looking for a whole checkpoint; the optimizer is untouched\n  "
        f"{standing.wanted} is not whole",
        found=found,
        where=directory,
        helps=helps,
    )
