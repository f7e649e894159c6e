"""Asynchronous saves: ColossalAI's writer writes tensors from memory while the job trains on.

ColossalAI (0.5.0, utils/safetensors.py: ``save``) gives the writer (TensorNVMe of November 2024, async_file_io.py:
``AsyncFileWriter``) the address and size of each tensor. The writer does not know strides, it does not wait for a
former save from the same pinned memory, and it does not shorten a file that exists.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt_ext.colossalai.files import NOT_WHOLE, refuse_objects
from mcore_ckpt_ext.colossalai.ranks import Ranks
from mcore_ckpt_ext.devices import empty_on_host

_WRITERS = "_mcore_ckpt_ext_writers"


def pinned_copy(values: dict[str, Any], pinned: dict[str, Any] | None) -> dict[str, Any]:
    """Copy values into the caller's pinned memory, contiguous, for ColossalAI's asynchronous writer.

    Memory that is missing, or of another dtype, is allocated.
    """
    if pinned is None:
        return values
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            if name not in pinned or pinned[name].dtype != value.dtype:
                pinned[name] = empty_on_host(value)
            values[name] = pinned[name].copy_(value)
    return values


@contextmanager
def former_save_finished(
    checkpoint_io: Any,
    owner: Any,
    ranks: Ranks,
    checkpoint: str | Path,
    names: tuple[str, str] | None = None,
    use_async: bool = True,
) -> Iterator[None]:
    """Begin an asynchronous save once the former one is written, and remove the former files.

    Args:
        checkpoint_io: ColossalAI's, with its writers.
        owner: the model or optimizer that is saved.
        ranks: the ranks that save.
        checkpoint: the file, or the folder of the shards.
        names: of a folder, the base of the names of its shards, and the name of its index.
        use_async: False does nothing.
    """
    if not use_async:
        yield
        return
    is_writer = ranks.is_writer()
    path = Path(checkpoint)

    def finish() -> None:
        for writer in (reference() for reference in vars(owner).pop(_WRITERS, ())):
            if writer is not None:
                writer.synchronize()
        if is_writer:
            _remove(path, names)

    ranks.agree(finish, f"saving {path.name}", NOT_WHOLE)
    writers = checkpoint_io.async_writers
    count = len(writers)
    yield
    vars(owner)[_WRITERS] = [weakref.ref(writer) for writer in writers[count:]]


def write_model(checkpoint_io: Any, model: Any, ranks: Ranks, path: Path, state: Mapping[str, Any]) -> None:
    """Begin to write a model's state into one safetensors file; all ranks call this, and one writes.

    Raises:
        ResumeRefusedError: on all ranks, if it cannot be written.
    """
    from colossalai.utils.safetensors import save

    is_writer = ranks.is_writer()

    def begin() -> None:
        if is_writer:
            refuse_objects(state)
            pinned = checkpoint_io.pinned_state_dicts.setdefault(hash(model), {})
            checkpoint_io.async_writers.append(save(str(path), pinned_copy(dict(state), pinned)))

    with former_save_finished(checkpoint_io, model, ranks, path):
        ranks.agree(begin, f"saving {path.name}", NOT_WHOLE)


@contextmanager
def consumer_errors_reported(owner: Any, method: str) -> Iterator[None]:
    """Report an error of ColossalAI's asynchronous writer to the ranks that wait for the next shard.

    ColossalAI's function receives the shards in a loop (0.5.0, checkpoint_io/utils.py:
    ``async_save_state_dict_shards``), so that its error does not reach the generator by itself.

    Args:
        owner: the model or optimizer that yields the shards.
        method: name of the method that returns their generator.
    """
    begun_here: list[Generator[Any]] = []
    original = getattr(owner, method)

    def record(*arguments: Any, **keywords: Any) -> Generator[Any]:
        begun_here.append(original(*arguments, **keywords))
        return begun_here[-1]

    setattr(owner, method, record)
    try:
        yield
    except Exception as error:
        for shards in begun_here:
            with suppress(Exception):  # the same error in the words that all ranks get
                shards.throw(error)
        raise
    finally:
        delattr(owner, method)


def _remove(checkpoint: Path, names: tuple[str, str] | None) -> None:
    """Remove a file; of a folder, the index and the shards."""
    if names is None:
        checkpoint.unlink(missing_ok=True)
    elif checkpoint.is_dir():
        from colossalai.checkpoint_io.utils import clean_folder

        base, index = names
        (checkpoint / index).unlink(missing_ok=True)
        clean_folder(str(checkpoint), base, [])
