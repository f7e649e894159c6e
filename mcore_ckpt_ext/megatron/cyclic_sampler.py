"""Lets Megatron's random sampler finish the epoch in progress under another layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mcore_ckpt_ext.continuity.cyclic import (
    HISTORY,
    ReadingLayout,
    as_argument,
    epoch_at,
    micro_batches,
)
from mcore_ckpt_ext.continuity.read_counts import drawn_permutation
from mcore_ckpt_ext.patching.singletons import PROCESS

_TRAINING = "train"
_VALIDATION = "valid"


class DataHistory:
    """The layouts that have read the data of the run that this process resumed."""

    layouts: tuple[ReadingLayout, ...] = ()

    def of(self, sampler: Any) -> Sequence[ReadingLayout]:
        """Return the layouts that have read the samples of a sampler; none if Megatron's own order holds.

        The data sets of Megatron Core name their split; one that does not is recognized by its position.
        """
        if len(self.layouts) < 2:
            return ()
        split = getattr(sampler.dataset, "split", getattr(sampler.dataset, "index_split", None))
        name = getattr(split, "name", None)
        position = sampler.consumed_samples
        for_training = self.layouts
        for_validation = [layout.validation_layout for layout in self.layouts]
        if name not in (_TRAINING, _VALIDATION):
            name = _TRAINING if position == for_training[-1].sample else None
            name = _VALIDATION if name is None and position == for_validation[-1].sample else name
        layouts = {_TRAINING: for_training, _VALIDATION: for_validation}.get(name or "", ())
        is_of_run = bool(layouts) and 0 < layouts[-1].sample <= position
        return layouts if is_of_run else ()


def keep_history(history: Sequence[ReadingLayout], arguments: Any) -> None:
    """Keep the layouts that have read the data, for the samplers of this process and for its checkpoints.

    Args:
        history: the layouts, oldest first.
        arguments: Megatron's arguments, which it saves in every checkpoint.
    """
    PROCESS.one(DataHistory).layouts = tuple(history)
    recorded = as_argument(history)
    if recorded is not None:
        setattr(arguments, HISTORY, recorded)


def wrap_iter(original: Callable[[Any], Iterator[list[int]]]) -> Callable[[Any], Iterator[list[int]]]:
    """Wrap `__iter__` of Megatron's random sampler, which yields a rank's micro batches of one epoch."""

    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[list[int]]:  # noqa: N807
        layouts = vars(self).setdefault("_ckpt_ext_layouts", PROCESS.one(DataHistory).of(self))
        return _rest_of_epoch(self, layouts) if layouts else original(self)

    return __iter__


def _rest_of_epoch(sampler: Any, layouts: Sequence[ReadingLayout]) -> Iterator[list[int]]:
    """Yield the micro batches of the epoch in progress, and advance the sampler as Megatron does."""
    layout = layouts[-1]
    consumed = sampler.consumed_samples
    epoch = epoch_at(layouts, sampler.total_samples, consumed)
    sampler.epoch = epoch.epoch
    if hasattr(sampler.dataset, "set_epoch"):  # `RandomSeedDataset`
        sampler.dataset.set_epoch(epoch.epoch)
    for batch in micro_batches(epoch, layout, consumed, sampler.data_parallel_rank, drawn_permutation):
        sampler.consumed_samples += layout.step
        yield batch
