"""A checkpoint whose job may have to be found out: by a description beside it, its index, its user."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from typing_extensions import override

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.errors import PackingError
from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.formats.description import (
    ARGUMENTS,
    Description,
    completed,
    contradicting,
    described,
    refuse_facts,
    stated_by_megatron,
)
from mcore_ckpt_ext.formats.elsewhere import (
    check_belonging,
    check_lender,
    lent_weights,
    not_of_it,
    told_of_the_model,
)
from mcore_ckpt_ext.formats.shown import layout_shown, model_shown, possible_layouts
from mcore_ckpt_ext.formats.wrapped_weights import RelocatedWeights
from mcore_ckpt_ext.layout.lent import LentWeight
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.loops.facts import NOTHING, Facts
from mcore_ckpt_ext.loops.verl import STEP
from mcore_ckpt_ext.storage.dcp_index import DcpIndex
from mcore_ckpt_ext.storage.two_folders import TwoFolders
from mcore_ckpt_ext.transfer import Transfer


class DescribedCheckpoint(Checkpoint):
    """A checkpoint with an index of its arrays and objects."""

    def __init__(self, folder: Path, witnesses: Sequence[ParameterOrder] = (), facts: Facts = NOTHING) -> None:
        """As there; `facts`: what the user states of the job, for a checkpoint without Megatron's arguments.

        Raises:
            UsageError: the checkpoint has them, or shows something else.
        """
        super().__init__(folder, witnesses)
        self._facts = facts
        self._lent: Mapping[str, LentWeight] = {}
        self._tried: Mapping[str, int] = {}
        self._lender: Checkpoint | None = None
        self._elsewhere: RelocatedWeights | None = None
        # What the index is read as may depend on the job, of which only the rest tells by then.
        self.index = DcpIndex({}, {}, {})
        self.index = self._read_index()
        self._forget_the_job()
        if facts != NOTHING and ARGUMENTS in self.common and self.arguments.tells_all:
            refuse_facts(facts, folder)

    @abstractmethod
    def _read_index(self) -> DcpIndex:
        """What `.metadata` says."""

    @cached_property
    @override
    def arguments(self) -> JobArguments:
        own = self._stated_by_megatron
        return own if own is not None and own.tells_all else self.description.arguments

    @cached_property
    def _stated_by_megatron(self) -> JobArguments | None:
        """Megatron's arguments, all or some; None where the checkpoint has none."""
        return stated_by_megatron(self.args, self.folder, self.sidecar) if ARGUMENTS in self.common else None

    @cached_property
    def description(self) -> Description:
        """What is known of the job: by Megatron's arguments, else by what lies beside the checkpoint and by its index.

        Raises:
            UsageError: the user states something else than the index shows.
        """
        own = self._stated_by_megatron
        if own is not None and own.tells_all:
            return Description(own, problems=contradicting(own, self.folder))
        found = described(self.reader, own, self.sidecar, self._facts)
        if self._lender is not None:
            found = found.with_model(told_of_the_model(self._lender))
        shown = layout_shown(self.index, self.random_state_grid(), {**found.arguments.stated, **self._tried})
        shown_of_model = model_shown(self.index.arrays, self.weights.names() or self._lent)
        return completed(found, {**shown_of_model, **shown}, self._facts, self.folder)

    def borrow(self, lent: Mapping[str, LentWeight]) -> None:
        """Take the model from elsewhere, where an optimizer is stored without its weights.

        Args:
            lent: what each weight is, by model-space name; nothing of the model may have been asked for before.
        """
        self._lent = lent
        self._forget_the_job()
        # Whoever fills an optimizer from here proves every element, so a layout may be tried that only fits.
        self._try_layouts(self._fits)

    def lend(self, lender: Checkpoint) -> None:
        """Take the weights from another checkpoint, where an optimizer is stored without them.

        Args:
            lender: the checkpoint.

        Raises:
            CheckpointError: they are not those of this optimizer, or nothing would prove that they are.
            UsageError: this checkpoint has weights of its own, or the other has none.
        """
        check_lender(lender, self)
        self.reader = reader = TwoFolders(self.reader, lender.reader)
        self.transfer, self._lender = Transfer(reader), lender
        self._elsewhere = RelocatedWeights(lender.weights, reader.name_of)
        self._forget_the_job()
        self._lent = lent_weights(lender, self.arguments)
        self._forget_the_job()
        if not self._try_layouts(self._is_proven):
            raise not_of_it("they fit under no layout that its buffers allow", self, lender.folder)
        check_belonging(self, lender.folder)

    @property
    def has_weights_elsewhere(self) -> bool:
        """Whether its weights are those of another checkpoint."""
        return self._lender is not None

    def lent_archives(self) -> Iterator[tuple[str, int, int]]:
        """Every archive of the checkpoint that has the weights, if it is another one."""
        if self._lender is not None and isinstance(self.reader, TwoFolders):
            for file, offset, length in self._lender.archives():
                yield self.reader.name_of(file), offset, length

    def _try_layouts(self, holds: Callable[[], bool]) -> bool:
        """Find a layout of the job under which something holds, where nothing tells of it; whether there is one."""
        if "tensor" not in self.layout.unknown or not (sizes_to_try := possible_layouts(self.index)):
            return True
        for sizes in sizes_to_try:
            self._tried = sizes
            self._forget_the_job()
            if holds():
                return True
        self._tried = {}
        self._forget_the_job()
        return False

    def _fits(self) -> bool:
        return all(found is not None for one in self.optimizer.buffers for found in one.proposed_packings().values())

    def _is_proven(self) -> bool:
        with contextlib.suppress(PackingError):
            return all(one.packing_of(group) for one in self.optimizer.buffers for group in one.groups.values())
        return False

    def _forget_the_job(self) -> None:
        known = "description", "arguments", "layout", "models", "experts_apart", "optimizer", "proof", "_own_weights"
        for name in known:
            vars(self).pop(name, None)

    @cached_property
    @override
    def models(self) -> LocalModels:
        if not self._lent:
            return super().models
        layout = self.layout
        stored = {name: weight.stored(layout.tensor, layout.expert_tensor) for name, weight in self._lent.items()}
        return LocalModels(stored, self.arguments, layout, self.experts_apart, self.layers())

    @property
    @override
    def iteration(self) -> int:
        above = (self.folder, *self.folder.parents[:3])
        step = next((match for one in above if (match := STEP.fullmatch(one.name))), None)
        return int(step[1]) if "iteration" not in self.common and step else super().iteration

    @property
    @override
    def vocabulary(self) -> int | None:
        return self._lender.vocabulary if self._lender else None

    @override
    def notices_of(self, view: Checkpoint) -> list[str]:
        lent = [f"the weights are those of {self._lender.folder}", *self._lender.notices()] if self._lender else []
        return [*self.description.problems, *super().notices_of(view), *lent]
