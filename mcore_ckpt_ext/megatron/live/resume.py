"""The state of a resume, which its phases advance, for ranks of a job and for simulated ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.formats.common_state import scheduler_in
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.views import with_first_moments
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parameter_order import ObservedOrder
from mcore_ckpt_ext.layout.weight_spec import WeightSpec
from mcore_ckpt_ext.megatron.live.job import RankSummary
from mcore_ckpt_ext.megatron.live.model import NameFunction
from mcore_ckpt_ext.megatron.load_session import LoadSession

LIVE_MODEL = "the live model"
"""Name of an order source: the order in which the running job registers its parameters."""


@dataclass(frozen=True)
class ResumeOptions:
    """The user's options of a resume.

    Attributes:
        verify_all: compare the checksums of all records, shared between the ranks.
        accept_lost: take elements that the checkpoint lost from the weights (masters) or as zero (moments).
        read_once: one rank reads data that several ranks need and sends them to the others.
        own_bounds: see `carried_groups`.
    """

    verify_all: bool = False
    accept_lost: bool = False
    read_once: bool = False
    own_bounds: bool = False


@dataclass
class Resume:
    """A resume, as far as its phases have brought it.

    Attributes:
        session: the folder to load.
        running: the arguments of the running job.
        options: the user's options.
        summaries: the models of all ranks.
        opened: the checkpoint with the evidence of the live model; None before it is opened.
        spell: maps live names to the checkpoint's.
    """

    session: LoadSession
    running: JobArguments
    options: ResumeOptions = ResumeOptions()
    summaries: Sequence[RankSummary] = ()
    opened: CheckpointView | None = field(default=None, init=False)
    spell: NameFunction = field(default=str, init=False)

    @property
    def checkpoint(self) -> CheckpointView:
        """The checkpoint with the evidence of the live model; before it is opened so, the checkpoint alone."""
        return self.session.checkpoint if self.opened is None else self.opened

    @property
    def schedule(self) -> dict[str, Any] | None:
        """The stored state of the learning rate scheduler; None if the checkpoint has none."""
        stored = scheduler_in(self.checkpoint.job.common())
        return stored if isinstance(stored, dict) else None

    def live_names(self) -> set[str]:
        """Return the names of all parameters and buffers of the live model."""
        return {name for summary in self.summaries for name in summary.names}

    def open_in_order(self, spell: NameFunction) -> None:
        """Open the checkpoint with the orders in which the running job's ranks register their parameters.

        Args:
            spell: maps live names to the checkpoint's.
        """
        orders = [list(map(spell, registered)) for summary in self.summaries for registered in summary.registered]
        evidence = [ObservedOrder(LIVE_MODEL, orders)] if orders else []
        self.opened = with_first_moments(self.session.with_orders(evidence))
        self.spell = spell

    def take_weights(self, specs: Sequence[Mapping[str, WeightSpec]]) -> None:
        """Describe the weights by those of the live job, for an optimizer that is stored without them.

        Args:
            specs: the weights of each rank.
        """
        weights = {name: weight for of_rank in specs for name, weight in of_rank.items()}
        self.opened = self.checkpoint.format.with_weights_of_a_job(weights)


def changed_padding(stored: int | None, rows: int | None) -> str:
    """Return how the rows of the vocabulary change on a resume, for the log; empty if they do not."""
    if stored is None or rows is None or stored == rows:
        return ""
    return f"; the vocabulary is padded to {quantity(rows, 'row')}, {stored:,} in the checkpoint"
