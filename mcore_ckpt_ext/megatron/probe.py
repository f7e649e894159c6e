"""Inspects, before a resume, the checkpoint to load: is it complete, and if not, which other one is?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mcore_ckpt_ext.collectives import refusal_text
from mcore_ckpt_ext.errors import CheckpointError, ResumeRefusedError, join_some
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import placement_changes
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.local_checkpoints import may_be_local
from mcore_ckpt_ext.megatron.new_tokens import stored_vocabulary_rows
from mcore_ckpt_ext.megatron.run_folder import folder_to_load, persistent_folder, takes_non_persistent
from mcore_ckpt_ext.megatron.shared_index import read_shared_index
from mcore_ckpt_ext.megatron.sources.huggingface import model_folder
from mcore_ckpt_ext.megatron.stored_progress import missing_progress
from mcore_ckpt_ext.operations.iteration_health import IterationHealth, iteration_health_of
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.overrides import Scope, overridden
from mcore_ckpt_ext.settings import FALLBACK, VERIFY_ALL
from mcore_ckpt_ext.storage.checkpoint_dirs import TRACKER_FILE
from mcore_ckpt_ext.storage.dcp_index import SharedIndex
from mcore_ckpt_ext.storage.file_digests import check_digests

Result = TypeVar("Result")
_SHOWN = 3


@dataclass(frozen=True)
class LoadProbe:
    """The observations of rank 0 before a resume; on a large job all ranks would overload the disk.

    Attributes:
        model: the Hugging Face folder to start from; then no other attribute is set.
        health: the health of the iteration that a resume would take; None if it is not assessed.
        index: the index of the checkpoint to load, for all ranks; None if each rank reads its own.
        vocabulary_rows: the number of vocabulary rows of the checkpoint to load; None if the job has no further tokens.
        missing: what the checkpoint does not say about the progress of its run.
        session: the load that rank 0 has begun; None on other ranks, and if it is undecided what Megatron takes.
    """

    model: Path | None = None
    health: IterationHealth | None = None
    index: SharedIndex | None = None
    vocabulary_rows: int | None = None
    missing: tuple[str, ...] = ()
    session: LoadSession | None = None

    def __reduce__(self) -> tuple[type[LoadProbe], tuple[Any, ...]]:
        """Pickle for the other ranks: each begins its own load."""
        return LoadProbe, (self.model, self.health, self.index, self.vocabulary_rows, self.missing)


def probe_checkpoint(arguments: Any, load_arg: str, directory: str | None, *, shares_index: bool) -> LoadProbe:
    """Inspect the checkpoint to load, on rank 0.

    Args:
        arguments: Megatron's arguments.
        load_arg: the name of the argument that holds the path to load from.
        directory: the run folder.
        shares_index: share the index even for an unchanged parallel layout, with which Megatron may load the checkpoint
            itself.
    """
    if (model := model_folder(arguments, load_arg)) is not None:
        return LoadProbe(model)
    if not directory or not Path(str(directory)).is_dir():
        return LoadProbe()
    session = _session_of(directory, arguments)
    health = _health_of(arguments, directory, session)
    if session is not None and session.index.shared is not None and health is None:
        check_digests(session.folder)  # `_health_of` includes this comparison
    if health is not None and health.problems and health.newest_complete is not None:
        other = persistent_folder(directory, arguments, health.newest_complete) if FALLBACK.choose(arguments) else None
        session = _begin(other, arguments)
    keeps = session is not None and (shares_index or _read(session, lambda load: _is_moved(load, arguments), False))
    rows = _read(session, lambda load: stored_vocabulary_rows(load.checkpoint, arguments), None)
    missing = _read(session, missing_progress, tuple[str, ...]())
    index = session.index.shared if session is not None and keeps else None
    if session is not None and not keeps:
        session.index = session.index.unshare()
    return LoadProbe(health=health, index=index, vocabulary_rows=rows, missing=missing, session=session)


def _session_of(directory: str, arguments: Any) -> LoadSession | None:
    """Begin the load of the iteration that Megatron takes; None if that is undecided.

    It takes the persistent one where the nodes have no newer local one.
    """
    is_persistent = may_be_local(arguments)
    return _begin((persistent_folder if is_persistent else folder_to_load)(directory, arguments), arguments)


def _begin(folder: Path | None, arguments: Any) -> LoadSession | None:
    return None if folder is None else LoadSession(folder, read_shared_index(folder, arguments))


def _read(session: LoadSession | None, read: Callable[[LoadSession], Result], otherwise: Result) -> Result:
    """Return what a function reads; `otherwise` if it cannot, which the load itself reports."""
    if session is not None:
        with suppress(CheckpointError, OSError):
            return read(session)
    return otherwise


def _is_moved(session: LoadSession, arguments: Any) -> bool:
    """Return True if the layout differs from the checkpoint's, so that this package reads tensors."""
    return bool(placement_changes(session.checkpoint.job.arguments(), JobArguments.of(vars(arguments))))


def trackers_seen(arguments: Any, load_arg: str) -> tuple[bool, ...]:
    """Return for each folder that a load may take whether this rank sees a tracker file in it."""
    if getattr(arguments, "non_persistent_ckpt_type", None):
        return ()
    return tuple(
        bool(folder) and (Path(str(folder)) / TRACKER_FILE).is_file() for folder in _named_paths(arguments, load_arg)
    )


def check_all_see(seen: Sequence[tuple[bool, ...]], arguments: Any, load_arg: str) -> None:
    """Refuse a load if only some ranks see a checkpoint: those ranks would wait for the others.

    Every rank looks for the tracker file itself, and only ranks that find it call a collective
    (`read_metadata`, megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2).

    Args:
        seen: `trackers_seen` of every rank.
        arguments: Megatron's arguments.
        load_arg: the name of the argument that holds the path to load from.

    Raises:
        ResumeRefusedError: some ranks see a tracker file that others do not see.
    """
    for folder, *sightings in zip(_named_paths(arguments, load_arg), *seen, strict=False):
        blind = [rank for rank, sees in enumerate(sightings) if not sees]
        if 0 < len(blind) < len(sightings):
            raise ResumeRefusedError(
                "mcore_ckpt_ext refused while inspecting the checkpoint; nothing is loaded\n  some ranks see no "
                "checkpoint where others do",
                found=f"no {TRACKER_FILE} on rank {join_some([str(rank) for rank in blind])}",
                expected="the same on all ranks",
                where=str(folder),
                hint="mount the folder on every machine, and start all ranks with the same --load",
            )


def check_all_have_the_same(settings: Sequence[Mapping[str, str]]) -> None:
    """Refuse a load if settings differ between ranks, so that ranks would call different collectives.

    Args:
        settings: this package's settings on every rank, by variable.

    Raises:
        ResumeRefusedError: some settings differ between ranks.
    """
    differing = [name for name in settings[0] if len({of_rank[name] for of_rank in settings}) > 1]
    if differing:
        values = {name: list(dict.fromkeys(of_rank[name] for of_rank in settings)) for name in differing}
        raise ResumeRefusedError(
            "mcore_ckpt_ext refused while inspecting the checkpoint; nothing is loaded\n  its settings are not "
            "the same on all ranks",
            found="; ".join(f"{name}: {' and '.join(distinct)}" for name, distinct in values.items()),
            expected="the same on all ranks",
            hint="export the variable on every machine, or give the flag to all ranks",
        )


def _named_paths(arguments: Any, load_arg: str) -> list[Any]:
    return [getattr(arguments, name, None) for name in (load_arg, "pretrained_checkpoint")]


@contextmanager
def resuming_from_complete(scope: Scope, health: IterationHealth | None) -> Iterator[None]:
    """Load the newest complete iteration within this scope, if the requested one is incomplete.

    `ckpt_step` has priority over the tracker in `load_checkpoint` and its callees, but only after `read_metadata` has
    read the tracker, which ends the job if it cannot (megatron/training/checkpointing.py, core_v0.8.0 to 0.19.2).

    Args:
        scope: the globals of Megatron's checkpointing module.
        health: the health of the requested iteration; None if it is not assessed. The user allows to take another one.
    """
    arguments = scope["get_args"]()
    if health is None or not health.problems:
        if health is not None and health.unfinished:
            names = ", ".join(map(str, sorted(health.unfinished)))
            announce(f"iteration {names} was not finished; resuming from {health.wanted}, which is complete")
        yield
        return
    if health.newest_complete is None:
        yield  # no other iteration is complete: the load itself fails and reports what is missing
        return
    problems = "; ".join(health.problems[:_SHOWN])
    announce(f"{health.wanted} is not complete ({problems}); resuming from iteration {health.newest_complete} instead")
    chosen = health.newest_complete
    named = overridden(scope, read_metadata=lambda *_, **__: (chosen, False))
    with named, overridden(vars(arguments), ckpt_step=chosen):
        yield


def _health_of(arguments: Any, directory: str, session: LoadSession | None) -> IterationHealth | None:
    """Assess the persistent iteration that a load takes; None if it may take another one."""
    if "://" in str(directory) or not hasattr(arguments, "ckpt_step") or takes_non_persistent(directory, arguments):
        return None
    index = None if session is None else session.index
    # Without another iteration to take, each rank checks its share of the bytes (`verify_checksums`).
    full = VERIFY_ALL.value and FALLBACK.choose(arguments)
    return iteration_health_of(Path(str(directory)), arguments.ckpt_step or None, index, full=full)


def check_complete(health: IterationHealth | None, directory: str) -> None:
    """Refuse an incomplete checkpoint if the run has another one that is complete.

    Args:
        health: the health of the iteration that a load would take; None if it is not assessed.
        directory: the run folder.

    Raises:
        ResumeRefusedError: it is incomplete, and the user did not allow to take another one.
    """
    if health is not None and health.problems and health.newest_complete is not None:
        raise _refusal(health, health.newest_complete, directory)


def _refusal(health: IterationHealth, number: int, directory: str) -> ResumeRefusedError:
    problems = "; ".join(health.problems[:_SHOWN])
    if len(health.problems) > _SHOWN:
        problems += f"; and {len(health.problems) - _SHOWN} more (to list them: mcore-ckpt verify PATH)"
    by_hand = f"--ckpt-step {number}" if health.has_tracker else f"writing {number} into the tracker file"
    hint = (
        f"iteration {number} is complete: {by_hand} takes it, "
        f"{FALLBACK.flag} (or {FALLBACK.name}=1) always takes the newest complete one"
    )
    return ResumeRefusedError(
        refusal_text("looking for a complete checkpoint", f"{health.wanted} is not complete"),
        found=problems,
        where=directory,
        hint=hint,
    )
