"""Gives a script with Energon the states of its data loader under another layout.

Megatron saves them as `iter_0000004/mp_rank_00/train_dataloader_dprank000.pt` under `--dataloader-save`, one for each
data-parallel rank; with pipeline stages the folder is `mp_rank_00_000`, and with expert-parallel ranks its name has
a further number. The script builds its loader after the load, and reads the state under the name that its own
layout gives. So the states are written once more, under those names, into another folder next to the saved ones, and
`--dataloader-save` names that folder until the next save.

Sources: `maybe_save_dataloader_state` and `get_checkpoint_name`, megatron/training/checkpointing.py, and
`train_valid_test_dataloaders_provider`, examples/multimodal/dataloader_provider.py, core_v0.16.1, 0.19.0 and the
development head of August 2026; `command_redist`, megatron/energon/tools/checkpoint.py, megatron-energon 7.4.1.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mcore_ckpt_ext.collectives import agree, is_first_rank
from mcore_ckpt_ext.continuity.energon import LoaderSizes, saves_loader_states
from mcore_ckpt_ext.continuity.order_change import CHANGES, DataOrder, OrderChange
from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError, UnsafePickleError, quantity
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.patching.overrides import Scope
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.pickle_stubs import origin_of
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

_ARGUMENT = "dataloader_save"
_SAVED_AT = "ckpt_ext_dataloader_save"
_FILE = "train_dataloader_dprank{:03d}.pt"
_ANY_FILE = "train_dataloader_dprank*.pt"
_STATE = "dataloader_state_dict"
_PHASE = "redistributing the states of the data loader"
_LOADED = "the checkpoint is loaded, and no file of it has changed"
_SCRIPT = "constants.pkl"  # the record by which torch.load takes an archive for a TorchScript module, and runs it
_NAMES: tuple[tuple[str, ...], ...] = (
    ("megatron.energon.savable_loader", "SavableDataLoaderState"),
    ("megatron.energon.savable_loader", "SavableDatasetCheckpoint"),
    ("megatron.energon.savable_loader", "SavableDatasetState"),
    ("megatron.energon.flavors.webdataset.sample_loader", "SliceState"),
    ("megatron.energon.rng", "SystemRngState"),
    ("megatron.energon.state", "FlexState"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("torch", "ByteStorage"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),
)
"""All that the states of Energon's own data sets contain."""
_NAMING = ("GLOBAL", "STACK_GLOBAL", "INST")  # opcodes of pickles


@dataclass(frozen=True)
class SavedStates:
    """The saved states of a data loader.

    Attributes:
        place: the value of `--dataloader-save`.
        iteration: the iteration of the checkpoint.
        files: the file of each data-parallel rank.
    """

    place: str
    iteration: int
    files: tuple[Path, ...]


def add_loader_states(
    order: DataOrder, written: JobArguments, running: JobArguments, folder: str
) -> tuple[DataOrder, SavedStates | None]:
    """Return the states with which a data loader goes on, and the account with them.

    Args:
        order: the account by the arguments of both jobs.
        written: the arguments of the job that saved the checkpoint.
        running: the arguments of the job that resumes it.
        folder: the name of the checkpoint's folder.
    """
    if order.changes or not saves_loader_states(running):
        return order, None
    try:
        states = _find(written, running, folder)
        if len(states.files) != running.data_parallel_size:
            _check(states, written)
    except UnsafePickleError:
        raise
    except (CheckpointError, OSError) as error:
        text = error.message if isinstance(error, CheckpointError) else str(error)
        reason = OrderChange("the states of the data loader", f"{text}, so that the data begins anew")
        changed = replace(order, verdict=CHANGES, changes=(reason,), note="", is_changed=True)
        if _files_of(running, folder):
            return replace(
                changed, read_again=None, never_read=None, uncounted="some ranks may go on, others not"
            ), None
        return replace(changed, read_again=order.sample, never_read=0), None
    return order, states


def _place_of(running: JobArguments) -> str:
    return str(running.raw.get(_SAVED_AT) or running.dataloader_save)


def _files_of(running: JobArguments, folder: str) -> list[Path]:
    return list(Path(_place_of(running), folder).glob(f"mp_rank_00*/{_ANY_FILE}"))


def _find(written: JobArguments, running: JobArguments, folder: str) -> SavedStates:
    """Return the files of the job that saved.

    Raises:
        UnreadableCheckpointError: one is missing, or there are others.
    """
    place = _place_of(running)
    root = Path(place, folder)
    usual = "mp_rank_00_000" if (written.pipeline_model_parallel_size or 1) > 1 else "mp_rank_00"
    files = list(root.glob(f"{usual}/{_ANY_FILE}")) or _files_of(running, folder)
    by_name = {path.name: path for path in files}
    names = list(map(_FILE.format, range(written.data_parallel_size or 0)))
    if set(by_name) != set(names):
        raise UnreadableCheckpointError(
            f"{root} has {len(by_name)} of them, the job of the checkpoint had "
            f"{quantity(len(names), 'data-parallel rank')}"
        )
    return SavedStates(place, int(folder.rpartition("_")[2]), tuple(by_name[name] for name in names))


def _check(states: SavedStates, written: JobArguments) -> None:
    """Read all states without executing anything of them.

    Raises:
        CheckpointError: a file is no state of Energon, or has another number of workers.
    """
    sizes = LoaderSizes.of(written)
    workers = {_workers_in(path) for path in states.files}
    if sizes is None or workers != {sizes.workers}:
        raise UnreadableCheckpointError(f"they are those of {sorted(workers)} workers, not of {written.num_workers}")


def _workers_in(path: Path) -> int:
    """Return the number of workers in a file whose classes are all Energon's."""
    with FolderReader(path.parent) as reader:
        archive = TorchArchive(reader, path.name)
        content = archive.load()
        start, size, _ = archive.find_record("data.pkl")
        foreign = sorted(_names_in(reader.read(path.name, start, size)) - set(_NAMES))
    if foreign or _SCRIPT in map(str.casefold, archive.names):
        raise UnreadableCheckpointError(f"{path} contains {'.'.join((foreign or [(_SCRIPT,)])[0])}, not only Energon's")
    try:
        state: Any = origin_of(content[_STATE]).state
        ((_, attributes),) = state
        return len(attributes["worker_states"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnreadableCheckpointError(f"{path} is no state of Energon's data loader") from error


def _names_in(data: bytes) -> set[tuple[str, ...]]:
    """Return all classes and functions that a pickle names, with the opcode that torch.save uses."""
    named = ((code.name, argument) for code, argument, _ in pickletools.genops(data))
    return {tuple(str(argument).split(" ")) for name, argument in named if name in _NAMING}


def provide_states(scope: Scope, arguments: Any, states: SavedStates) -> None:
    """Write the states for the ranks of this job, unless the script finds the saved ones. Collective.

    Args:
        scope: the globals of Megatron's checkpointing module.
        arguments: Megatron's arguments; `--dataloader-save` then names the folder with the written states.
        states: the saved states.

    Raises:
        ResumeRefusedError: on every rank, if they cannot be written.
    """
    ranks = scope["mpu"]
    size = ranks.get_data_parallel_world_size()
    target = str(Path(states.place, f"energon_dp{size}"))

    def names() -> tuple[int, str, str]:
        rank = ranks.get_data_parallel_rank()
        name = {"tensor_rank": 0, "pipeline_rank": 0, "basename": _FILE.format(rank)}
        saved, written = (
            scope["get_checkpoint_name"](place, states.iteration, **name) for place in (states.place, target)
        )
        return rank, saved, written

    named = agree(_PHASE, names, _LOADED)
    if len(states.files) == size and all(Path(saved) == states.files[rank] for rank, saved, _ in named):
        return
    written = {Path(path): rank for rank, _, path in named}
    agree(_PHASE, lambda: _write(states, size, written) if is_first_rank() else None, _LOADED)
    setattr(arguments, _SAVED_AT, states.place)
    setattr(arguments, _ARGUMENT, target)


def restore_argument(arguments: Any) -> None:
    """Save the next states under the user's `--dataloader-save`, because the loader has been built."""
    place = vars(arguments).pop(_SAVED_AT, None)
    if place is not None:
        setattr(arguments, _ARGUMENT, place)


def _write(states: SavedStates, size: int, names: dict[Path, int]) -> None:
    """Write the state of each of `size` ranks under its names."""
    is_same_size = len(states.files) == size
    contents = [] if is_same_size else redistribute([_load(path) for path in states.files], size)
    for path, rank in names.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        if is_same_size:
            shutil.copyfile(states.files[rank], partial)
        else:
            torch.save({_STATE: contents[rank]}, partial)
        partial.replace(path)


def redistribute(states: Sequence[Any], size: int) -> list[Any]:
    """Return the states of `size` ranks with the workers of others, in their order.

    `command_redist` does the same, but its release 7.4.1 fails with a single file ("No numeric portion found").

    Args:
        states: Energon's states of all saved ranks.
        size: the number of ranks, by which the number of all workers is divisible.
    """
    workers = [worker for state in states for worker in state.worker_states]
    each = len(workers) // size
    return [
        replace(states[0], worker_states=workers[start : start + each], next_worker_id=0)
        for start in range(0, len(workers), each)
    ]


class _EnergonUnpickler(pickle.Unpickler):
    """Imports only the classes of Energon's states; torch derives its own unpickler from it."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of `_NAMES`."""
        if (module, name) not in _NAMES:
            raise UnsafePickleError("a state has changed while it was read", found=f"{module}.{name}")
        return super().find_class(module, name)


def _load(path: Path) -> Any:
    """Return Energon's state in a file that `_check` has read."""
    pickles: Any = SimpleNamespace(__name__="pickle", Unpickler=_EnergonUnpickler)
    content = io.BytesIO(path.read_bytes())
    return torch.load(content, map_location="cpu", pickle_module=pickles, weights_only=False)[_STATE]
