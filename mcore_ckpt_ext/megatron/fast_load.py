"""Replaces Megatron's loader of `torch_dist` within a scope: this package reads the tensors.

It implements `--ckpt-ext-load fast`. `dist_checkpointing.load` ends in `TorchDistLoadShardedStrategy.load`
(strategies/torch.py, core_v0.12.1 to 0.19.2, and the development head), whose argument holds the array, the place and
the memory of every tensor. Megatron still performs all other steps: before it the checks of access and strictness,
after it merges, factories and `load_state_dict`, and the load of the small pickled objects. All ranks call it equally
often, since it is a collective up to 0.16.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from mcore_ckpt_ext.collectives import Failure, agree, agree_here, rank_and_size
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.checkpoint import Checkpoint
from mcore_ckpt_ext.formats.torch_dist.reader import TorchDistCheckpoint, torch_dist_reader
from mcore_ckpt_ext.megatron.live.compatibility import verify_checksums
from mcore_ckpt_ext.megatron.live.sharded_load import (
    ShardedLoad,
    check_objects,
    missing_extra_states,
    unsupported_reason,
    with_stored_key,
)
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.shared_index import TorchIndex, read_index_once
from mcore_ckpt_ext.megatron.trees import leaves
from mcore_ckpt_ext.patching.log import announce, missing_extra_states_message
from mcore_ckpt_ext.settings import LOAD, VERIFY_ALL

_STRATEGIES = "megatron.core.dist_checkpointing.strategies.torch"
_UNTOUCHED = "nothing is written yet"
_MAPPING = "megatron.core.dist_checkpointing.mapping"


@contextmanager
def reading_fast(
    session: LoadSession, opened: Checkpoint | None = None, *, read_once: bool = False
) -> Iterator[list[str]]:
    """Read the tensors that Megatron's loader requests with this package, within this scope.

    If some rank requests something unsupported, Megatron's own loader reads everything, before anything is written.

    Args:
        session: the folder to load; another one that Megatron loads meanwhile is opened by itself.
        opened: the checkpoint, if it has been opened and verified with further evidence.
        read_once: one rank reads data that several ranks need and sends them to the others.

    Yields:
        A list that receives a log line for each load that this package has read.

    Raises:
        ResumeRefusedError: on every rank, if the part of some rank is damaged.
    """
    strategy: Any = import_module(_STRATEGIES).TorchDistLoadShardedStrategy
    original = strategy.load
    log_lines: list[str] = []

    @functools.wraps(original)
    def load(self: Any, sharded_state_dict: Any, checkpoint_dir: Any, *more: Any, **keywords: Any) -> Any:
        def stock(request: Any) -> Any:
            return original(self, request, checkpoint_dir, *more, **keywords)

        started = time.monotonic()
        here = session.with_folder(Path(str(checkpoint_dir)))
        checked = opened if here is session else None
        answer, nbytes = _FastLoad(sharded_state_dict, here, checked, stock).run(index, read_once=read_once)
        if nbytes:
            log_lines.append(f"{nbytes / 1e6:,.1f} MB of tensors read in {time.monotonic() - started:.1f} s")
        return answer

    with read_index_once(session.index) as index:
        strategy.load = load
        try:
            yield log_lines
        finally:
            strategy.load = original


class _Plan(NamedTuple):
    """How a rank would serve its requests.

    Attributes:
        refusal: why Megatron's own loader has to serve them; None if this package can.
        objects: the number of pickled objects to read.
        missing: the number of requested extra states that the checkpoint lacks.
    """

    refusal: str | None
    objects: int
    missing: int


class _FastLoad:
    """A load of a sharded state dict, with the tensors read by this package if it supports all requests."""

    _checkpoint: TorchDistCheckpoint  # set by `_plan`, like `_tensors`, if it does not refuse
    _tensors: ShardedLoad

    def __init__(
        self, request: Any, session: LoadSession, opened: Checkpoint | None, stock: Callable[[Any], Any]
    ) -> None:
        """Begin a load.

        Args:
            request: the sharded state dict: a tree of ShardedTensors and ShardedObjects.
            session: the folder to load.
            opened: its checkpoint, if it has been opened and verified with further evidence.
            stock: Megatron's own loader.
        """
        self._request = request
        self._requests = _Requests.of(request)
        self._session = session
        self._opened = opened
        self._stock = stock
        self._missing: list[Any] = []

    def run(self, index: TorchIndex, *, read_once: bool) -> tuple[Any, int]:
        """Load it.

        Args:
            index: what torch reads as the index.
            read_once: one rank reads data that several ranks need and sends them to the others.

        Returns:
            The loaded state dict, and the number of bytes that all ranks read; 0 if Megatron's own loader read it.
        """
        plans = agree("planning the load", self._plan, _UNTOUCHED)
        for rank, plan in enumerate(plans):
            if plan.refusal is not None:
                announce(f"{LOAD.flag}: Megatron's own loader reads this checkpoint (rank {rank}: {plan.refusal})")
                return self._stock(self._request), 0
        self._announce_missing(sum(plan.missing for plan in plans))
        some = any(plan.objects for plan in plans)
        # Objects first: if one of them is damaged, nothing has been written yet.
        read_objects = functools.partial(self._read_objects, index, some=some)
        values = agree_here("reading the pickled objects", read_objects, _UNTOUCHED)
        if read_once:
            self._tensors.share(agree("planning what is read once", self._tensors.wanted_bytes, _UNTOUCHED))
        tensors: list[Any] = []

        def read() -> int:
            tensors.extend(self._tensors.read())
            return self._tensors.bytes_read

        nbytes = sum(agree("reading the model", read, "it is partly written: do not train on, start again"))
        values |= zip(map(id, self._requests.tensors), tensors, strict=True)
        return _answer(self._request, values), nbytes

    def _plan(self) -> _Plan:
        checkpoint, refusal = _torch_dist_checkpoint(self._session, self._opened)
        refusal = refusal or self._requests.unknown
        if checkpoint is not None and refusal is None:
            refusal = self._refusal_of(checkpoint)
        return _Plan(refusal, len(self._requests.objects) - len(self._missing), len(self._missing))

    def _refusal_of(self, checkpoint: TorchDistCheckpoint) -> str | None:
        """Plan the reads of this rank, or return why this package does not support them."""
        tensors = [with_stored_key(entry, checkpoint) for entry in self._requests.tensors]
        if reason := unsupported_reason(tensors, checkpoint):
            return reason
        try:
            self._tensors = ShardedLoad(tensors, checkpoint)
        except UnsupportedCheckpointError as error:
            return str(error)
        self._checkpoint = checkpoint
        self._missing = missing_extra_states(self._requests.objects, checkpoint)
        if VERIFY_ALL.value and checkpoint.view is not self._opened:  # an open checkpoint is verified already
            verify_checksums(checkpoint.view, *rank_and_size())
        return "some of it is stored quantized" if self._tensors.is_quantized else None

    def _announce_missing(self, number: int) -> None:
        if number:
            were_dropped = bool(self._checkpoint.job.arguments().raw.get("ckpt_drop_redundant_extra_state"))
            announce(missing_extra_states_message(number, were_dropped=were_dropped))

    def _read_objects(self, index: TorchIndex, *, some: bool) -> dict[int, Any]:
        """Return the pickled objects by the `id` of their requests, None for missing ones.

        Args:
            index: what torch reads as the index.
            some: whether any rank requests one.
        """
        missing = set(map(id, self._missing))
        stored = [entry for entry in self._requests.objects if id(entry) not in missing]
        try:
            with index.objects_only():  # a collective up to 0.16: all ranks call it, or none
                objects = self._stock({str(number): entry for number, entry in enumerate(stored)}) if some else {}
        except (Exception, Failure):
            check_objects(stored, self._checkpoint)
            raise
        return dict.fromkeys(missing) | {id(entry): objects[str(number)] for number, entry in enumerate(stored)}


def _torch_dist_checkpoint(
    session: LoadSession, opened: Checkpoint | None
) -> tuple[TorchDistCheckpoint | None, str | None]:
    """Return the open checkpoint, or the reason why this package does not read it."""
    if not session.folder.is_dir():
        return None, f"{session.folder} is not a folder of this machine"
    try:
        opened = session.checkpoint if opened is None else opened
    except UnsupportedCheckpointError as error:
        return None, str(error)
    reader = torch_dist_reader(opened)
    return reader, None if reader is not None else f"a checkpoint in {opened.format.name}"


@dataclass(frozen=True)
class _Requests:
    """The requests in a sharded state dict.

    Attributes:
        tensors: its ShardedTensors.
        objects: its ShardedObjects.
        unknown: why this package does not support one of its requests; None if it supports all.
    """

    tensors: list[Any]
    objects: list[Any]
    unknown: str | None

    @classmethod
    def of(cls, tree: Any) -> _Requests:
        mapping: Any = import_module(_MAPPING)
        requested = list(leaves(tree))
        tensors = [leaf for leaf in requested if type(leaf) is mapping.ShardedTensor]
        objects = [leaf for leaf in requested if type(leaf) is mapping.ShardedObject]
        others = [leaf for leaf in requested if type(leaf) not in (mapping.ShardedTensor, mapping.ShardedObject)]
        return cls(tensors, objects, f"it requests a {type(others[0]).__name__}" if others else None)


def _answer(tree: Any, values: Mapping[int, Any]) -> Any:
    """Return the tree with the loaded values as leaves; like Megatron, drop dicts that request nothing."""
    if isinstance(tree, dict):
        answers = {key: _answer(value, values) for key, value in tree.items()}
        return {key: answer for key, answer in answers.items() if not _is_empty(tree[key])}
    if isinstance(tree, list):
        return [_answer(value, values) for value in tree]
    return values[id(tree)]


def _is_empty(tree: Any) -> bool:
    return isinstance(tree, (dict, list)) and not any(True for _ in leaves(tree))
