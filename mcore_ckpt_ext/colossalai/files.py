"""Writes ColossalAI's files atomically, with temporary names and the index last.

Names and indexes are ColossalAI's own (0.5.0, checkpoint_io/utils.py: ``get_model_base_filenames``,
``get_optimizer_base_filenames``, ``get_shard_filename``; index_file.py). An interrupted save leaves either the former
files, or a folder without an index, which no reader accepts; it never leaves files of two saves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt_ext.colossalai.ranks import Ranks
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.storage.atomic_files import flush

NOT_WHOLE = "no new checkpoint is there"


class Files:
    """Files of one folder, which are published together; only one rank writes them.

    Args:
        folder: the folder; it is made if it does not exist.
        name: the name of the last file, without which the others do not count.
        is_writer: True if this rank writes them; on other ranks all methods do nothing.
    """

    def __init__(self, folder: Path, name: str, is_writer: bool) -> None:
        self._folder = folder
        self._last = name
        self.is_writer = is_writer
        self._scratch = folder / f".{name}.partial"
        self._names: list[str] = []

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_writer:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def add(self, name: str, write: Callable[[Path], object]) -> None:
        """Write a file under a temporary name."""
        if not self.is_writer:
            return
        self._scratch.mkdir(parents=True, exist_ok=True)
        write(self._scratch / name)
        flush(self._scratch / name)
        self._names.append(name)

    def add_folder(self, write: Callable[[Path], object]) -> None:
        """Add all files that `write` puts into a folder."""
        if not self.is_writer:
            return
        folder = self._scratch / "more"
        folder.mkdir(parents=True, exist_ok=True)
        write(folder)
        for file in sorted(folder.iterdir()):
            file.replace(self._scratch / file.name)
            flush(self._scratch / file.name)
            self._names.append(file.name)

    def publish(self) -> None:
        """Rename all files to their final names.

        If there are several, remove the old version of the last one first. So old and new files never mix, and a single
        file is always either the old or the new one.
        """
        if not self.is_writer:
            return
        if set(self._names) != {self._last}:
            (self._folder / self._last).unlink(missing_ok=True)
        for name in sorted(dict.fromkeys(self._names), key=lambda name: name == self._last):
            (self._scratch / name).replace(self._folder / name)
        flush(self._folder)


def write_sharded(
    folder: Path,
    names: tuple[str, str],
    shards: Generator[tuple[Any, int]],
    ranks: Ranks,
    add_more: Callable[[Files], Mapping[str, Any]],
) -> None:
    """Receive all shards on every rank, and write them and their index on one.

    Args:
        folder: the folder; files of an older save that the index does not name are removed.
        names: ColossalAI's base of the names of the shards, and the name of the index.
        shards: the shards, each with its size in bytes; an error of writing is thrown into the generator, which reports
            it to the other ranks.
        ranks: the ranks that save.
        add_more: adds further files, and returns further metadata for the index.

    Raises:
        ResumeRefusedError: on all ranks, if a file cannot be written.
    """
    from colossalai.checkpoint_io.utils import clean_folder, get_shard_filename

    base, index = names
    entries: dict[str, str] = {}
    total = 0
    with Files(folder, index, ranks.is_writer()) as files:
        for place, (shard, size) in enumerate(shards):
            name = get_shard_filename(base, place)
            try:
                files.add(name, partial(write_tensors, shard))
            except Exception as error:  # noqa: BLE001 - the generator raises it, on all ranks
                shards.throw(error)
            entries.update((str(key), name) for key in shard)
            total += size

        def finish() -> None:
            content = {"metadata": {**add_more(files), "total_size": total}, "weight_map": entries}
            files.add(index, lambda path: path.write_text(json.dumps(content, indent=2) + "\n"))
            files.publish()
            if files.is_writer:
                clean_folder(str(folder), base, list(entries.values()))

        ranks.agree(finish, f"saving {index}", NOT_WHOLE)


def write_one(path: Path, state: Any, ranks: Ranks) -> None:
    """Write a state into one file.

    Args:
        path: the file; it is replaced atomically.
        state: tensors and plain values; ranks that do not write may pass anything.
        ranks: the ranks that save.

    Raises:
        ResumeRefusedError: on all ranks, if it cannot be written.
    """
    with Files(path.parent, path.name, ranks.is_writer()) as files:

        def finish() -> None:
            files.add(path.name, partial(write_tensors, state))
            files.publish()

        ranks.agree(finish, f"saving {path.name}", NOT_WHOLE)


def write_tensors(state: Mapping[Any, Any], path: Path) -> None:
    """Write a state in the file format that the name's suffix implies.

    Raises:
        UnsupportedCheckpointError: the format cannot hold an entry.
    """
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        refuse_objects(state)
        # The format has no strides, and the library refuses non-contiguous tensors.
        save_file({name: value.contiguous() for name, value in state.items()}, path, metadata={"format": "pt"})
    else:
        torch.save(state, path)


def refuse_objects(state: Mapping[Any, Any]) -> None:
    """Refuse entries that safetensors files cannot hold.

    Raises:
        UnsupportedCheckpointError: an entry is no tensor.
    """
    if other := next((name for name, value in state.items() if not isinstance(value, torch.Tensor)), None):
        raise UnsupportedCheckpointError(
            "safetensors files cannot hold an entry that is no tensor",
            found=type(state[other]).__name__,
            where=other,
            hint="save with use_safetensors=False, or return a tensor from get_extra_state",
        )
