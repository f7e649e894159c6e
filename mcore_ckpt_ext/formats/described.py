"""A checkpoint whose job may have to be found out: by a description beside it, its index, its user."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from typing_extensions import override

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.formats.description import (
    ARGUMENTS,
    Description,
    completed,
    described,
    refuse_facts,
    stated_by_megatron,
)
from mcore_ckpt_ext.formats.shown import layout_shown, model_shown, possible_layouts
from mcore_ckpt_ext.layout.lent import LentWeight
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.loops.facts import NOTHING, Facts
from mcore_ckpt_ext.loops.verl import STEP
from mcore_ckpt_ext.storage.dcp_index import DcpIndex


class DescribedCheckpoint(Checkpoint):
    """A checkpoint with an index of its arrays and objects."""

    def __init__(self, folder: Path, witnesses: Sequence[ParameterOrder] = (), facts: Facts = NOTHING) -> None:
        """As there; `facts`: what the user states of the job, for a checkpoint without Megatron's arguments.

        Raises:
            UsageError: the checkpoint has them, or shows something else.
        """
        super().__init__(folder, witnesses)
        self.index = self._read_index()
        self._facts = facts
        self._lent: Mapping[str, LentWeight] = {}
        self._tried: Mapping[str, int] = {}
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
            return Description(own)
        found = described(self.reader, own, self.sidecar, self._facts)
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
        if "tensor" not in self.layout.unknown or self.optimizer_format is None:
            return
        # Whoever fills an optimizer from here proves every element, so a layout may be tried that only fits.
        for sizes in possible_layouts(self.index):
            self._tried = sizes
            self._forget_the_job()
            if all(found is not None for one in self.optimizer.buffers for found in one.proposed_packings().values()):
                return
        self._tried = {}
        self._forget_the_job()

    def _forget_the_job(self) -> None:
        for name in ("description", "arguments", "layout", "models", "experts_apart", "optimizer", "proof"):
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

    @override
    def notices(self) -> list[str]:
        return [*self.description.problems, *super().notices()]
