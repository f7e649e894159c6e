"""Before a resume: what there is to load, whether it is whole, and if not, which one would do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.collectives import refusal_text
from mcore_ckpt_ext.errors import CheckpointError, ResumeRefusedError, join_some
from mcore_ckpt_ext.megatron.new_tokens import stored_vocabulary_rows
from mcore_ckpt_ext.megatron.run_folder import folder_named
from mcore_ckpt_ext.megatron.shared_index import index_of, is_moved
from mcore_ckpt_ext.megatron.sources.huggingface import model_folder
from mcore_ckpt_ext.operations.iteration_health import IterationHealth, iteration_health_of
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.overrides import overridden
from mcore_ckpt_ext.settings import FALLBACK
from mcore_ckpt_ext.storage.checkpoint_dirs import TRACKER_FILE
from mcore_ckpt_ext.storage.dcp_index import SharedIndex, using_index
from mcore_ckpt_ext.storage.file_digests import check_digests

_SHOWN = 3


@dataclass(frozen=True)
class LoadProbe:
    """What the first rank sees before a resume; a look by every rank would cost a big job's file system dearly.

    Attributes:
        model: the Hugging Face folder to start from; then nothing else matters.
        health: of the checkpoint that a resume would take, and None where that is not to be judged.
        index: of what is to be loaded, for all ranks; None where each rank reads its own.
        vocabulary_rows: of what is to be loaded, where the job may have tokens beyond them.
    """

    model: Path | None = None
    health: IterationHealth | None = None
    index: SharedIndex | None = None
    vocabulary_rows: int | None = None


def probe_checkpoint(arguments: Any, load_arg: str, directory: str | None, *, shares_index: bool) -> LoadProbe:
    """Look, as the first rank.

    Args:
        arguments: Megatron's.
        load_arg: the name of the one that says what is loaded.
        directory: the run folder.
        shares_index: also where the parallel layout is the one that was saved, so that Megatron may load everything.
    """
    if (model := model_folder(arguments, load_arg)) is not None:
        return LoadProbe(model)
    step = getattr(arguments, "ckpt_step", None)
    if not directory or not Path(str(directory)).is_dir():
        return LoadProbe()
    index = index_of(directory, step, arguments)
    with using_index(index):
        health = _health_of(arguments, directory)
    if index is not None and health is None:  # what is judged is compared there
        check_digests(index.folder)
    if health is not None and health.problems and health.newest_complete is not None:
        index = index_of(directory, health.newest_complete, arguments) if FALLBACK.chosen(arguments) else None
    keeps = index is not None and (shares_index or is_moved(index, arguments))
    rows = _vocabulary_rows(folder_named(directory, arguments) if index is None else index.folder, index, arguments)
    return LoadProbe(health=health, index=index if keeps else None, vocabulary_rows=rows)


def _vocabulary_rows(folder: Path | None, index: SharedIndex | None, arguments: Any) -> int | None:
    """See `stored_vocabulary_rows`; what is wrong with the checkpoint is found, and named, by its load."""
    if folder is None:
        return None
    with suppress(CheckpointError, OSError), using_index(index):
        return stored_vocabulary_rows(folder, arguments)
    return None


def trackers_seen(arguments: Any, load_arg: str) -> tuple[bool, ...]:
    """Whether this rank sees a checkpoint in each folder that a load may take: a tracker file, as Megatron looks."""
    if getattr(arguments, "non_persistent_ckpt_type", None):
        return ()
    return tuple(
        bool(folder) and (Path(str(folder)) / TRACKER_FILE).is_file() for folder in _named(arguments, load_arg)
    )


def check_all_see(seen: Sequence[tuple[bool, ...]], arguments: Any, load_arg: str) -> None:
    """Refuse a load of which some ranks have nothing: the others would wait for them.

    Every rank looks for itself whether there is a tracker file, and only those that find it meet in a collective
    (`read_metadata`, megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2).

    Args:
        seen: `trackers_seen` of every rank.
        arguments: Megatron's.
        load_arg: the name of the one that says what is loaded.

    Raises:
        ResumeRefusedError: some ranks see what others do not.
    """
    for folder, *found in zip(_named(arguments, load_arg), *seen, strict=False):
        blind = [rank for rank, sees in enumerate(found) if not sees]
        if 0 < len(blind) < len(found):
            raise ResumeRefusedError(
                "mcore_ckpt_ext refused while inspecting the checkpoint; nothing is loaded\n  some ranks see no "
                "checkpoint where others do",
                found=f"no {TRACKER_FILE} on rank {join_some([str(rank) for rank in blind])}",
                expected="the same on all ranks",
                where=str(folder),
                hint="mount the folder on every machine, and start all ranks with the same --load",
            )


def check_all_have_the_same(settings: Sequence[Mapping[str, str]]) -> None:
    """Refuse a load of which ranks would go different ways.

    Args:
        settings: this package's settings on every rank, by variable.

    Raises:
        ResumeRefusedError: some are not the same on all ranks.
    """
    differing = [name for name in settings[0] if len({of_rank[name] for of_rank in settings}) > 1]
    if differing:
        values = {name: list(dict.fromkeys(of_rank[name] for of_rank in settings)) for name in differing}
        raise ResumeRefusedError(
            "mcore_ckpt_ext refused while inspecting the checkpoint; nothing is loaded\n  its settings are not "
            "the same on all ranks",
            found="; ".join(f"{name}: {' and '.join(found)}" for name, found in values.items()),
            expected="the same on all ranks",
            hint="export the variable on every machine, or give the flag to all ranks",
        )


def _named(arguments: Any, load_arg: str) -> list[Any]:
    return [getattr(arguments, name, None) for name in (load_arg, "pretrained_checkpoint")]


@contextmanager
def resuming_from_complete(
    scope: MutableMapping[str, Any], directory: str | None, health: IterationHealth | None
) -> Iterator[None]:
    """Have the load within this scope take the newest whole iteration, if the one it wants is not whole.

    `ckpt_step` outweighs the tracker in `load_checkpoint` and what it calls, but only once `read_metadata` has read it,
    which ends the job where it cannot (megatron/training/checkpointing.py, core_v0.8.0 to 0.19.2).

    Args:
        scope: the globals of Megatron's checkpointing module.
        directory: the run folder.
        health: of the iteration that it wants; None where that is not judged.

    Raises:
        ResumeRefusedError: on every rank, when another one is whole, but the user did not allow it to be taken.
    """
    arguments = scope["get_args"]()
    if health is None or not health.problems:
        if health is not None and health.unfinished:
            names = ", ".join(map(str, sorted(health.unfinished)))
            announce(f"iteration {names} was not finished; resuming from {health.wanted}, which is complete")
        yield
        return
    if health.newest_complete is None:
        yield  # nothing to choose from: the load itself finds out, and names what it misses
        return
    if not FALLBACK.chosen(arguments):
        check_complete(health, str(directory))
    what = "; ".join(health.problems[:_SHOWN])
    announce(f"{health.wanted} is not complete ({what}); resuming from iteration {health.newest_complete} instead")
    chosen = health.newest_complete
    named = overridden(scope, read_metadata=lambda *_, **__: (chosen, False))
    with named, overridden(vars(arguments), ckpt_step=chosen):
        yield


def _health_of(arguments: Any, directory: str) -> IterationHealth | None:
    other_kind = getattr(arguments, "non_persistent_ckpt_type", None)
    if other_kind or "://" in str(directory) or not hasattr(arguments, "ckpt_step"):
        return None
    return iteration_health_of(Path(str(directory)), arguments.ckpt_step or None)


def check_complete(health: IterationHealth | None, directory: str) -> None:
    """Refuse a checkpoint that is not whole where the run has another one that is.

    Args:
        health: of what a load would take; None where that is not judged.
        directory: the run folder.

    Raises:
        ResumeRefusedError: it is not whole, and the user did not allow another one to be taken.
    """
    if health is not None and health.problems and health.newest_complete is not None:
        raise _refusal(health, health.newest_complete, directory)


def _refusal(health: IterationHealth, number: int, directory: str) -> ResumeRefusedError:
    found = "; ".join(health.problems[:_SHOWN])
    if len(health.problems) > _SHOWN:
        found += f"; and {len(health.problems) - _SHOWN} more (to list them: mcore-ckpt verify PATH)"
    by_hand = f"--ckpt-step {number}" if health.has_tracker else f"writing {number} into the tracker file"
    hint = (
        f"iteration {number} is complete: {by_hand} takes it, "
        f"{FALLBACK.flag} (or {FALLBACK.name}=1) always takes the newest complete one"
    )
    return ResumeRefusedError(
        refusal_text("looking for a complete checkpoint", f"{health.wanted} is not complete"),
        found=found,
        where=directory,
        hint=hint,
    )
