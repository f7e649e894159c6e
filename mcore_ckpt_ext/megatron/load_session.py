"""The folder that a load takes, with its index and open checkpoint, each read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.patching.singletons import PROCESS
from mcore_ckpt_ext.storage.dcp_index import FolderIndex, SharedIndex


class LoadSession:
    """The folder that a load takes, from the first look at it to the last write.

    All parts of a load get it as an argument, so that none of them opens the folder once more.

    Attributes:
        folder: the iteration folder, or any folder with a checkpoint.
        index: its index.
    """

    def __init__(self, folder: Path, shared: SharedIndex | None = None) -> None:
        """Begin a load; nothing is read yet.

        Args:
            folder: the iteration folder.
            shared: its index, if another rank has read it for this one.
        """
        self.folder = folder
        self.index = FolderIndex(folder, shared)

    def with_folder(self, folder: Path) -> LoadSession:
        """Return this session, or another one if Megatron takes another folder than expected."""
        return self if self.index.is_of(folder) else LoadSession(folder)

    @property
    def checkpoint(self) -> CheckpointView:
        """The checkpoint, opened without the parameter order of a live model.

        Raises:
            CheckpointError: see `open_checkpoint`.
        """
        return self.with_orders(())

    def with_orders(self, orders: Sequence[ParameterOrder]) -> CheckpointView:
        """Return the checkpoint with further evidence of the order of its parameters.

        Args:
            orders: parameter orders to try when the packing of the gradient buffers is recovered.

        Raises:
            CheckpointError: see `open_checkpoint`.
        """
        return open_checkpoint(self.folder, order_sources=orders, index=self.index)


class RunningLoad:
    """The load of Megatron's own loop in this process, for wrappers of what Megatron calls meanwhile."""

    session: Callable[[], LoadSession] | None = None


@contextmanager
def running_load(session: Callable[[], LoadSession]) -> Iterator[None]:
    """Within this scope, `session_at` returns the session of a load; `session` returns it."""
    state = PROCESS.one(RunningLoad)
    before = state.session
    state.session = session
    try:
        yield
    finally:
        state.session = before


def session_at(folder: Path) -> LoadSession:
    """Return the session of the load that Megatron performs now, if it is of this folder; else begin one."""
    session = PROCESS.one(RunningLoad).session
    return LoadSession(folder) if session is None else session().with_folder(folder)
