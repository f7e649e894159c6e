"""The phases of a load by a loop on Megatron Core, in order, and a rank's part in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mcore_ckpt_ext.collectives import is_first_rank
from mcore_ckpt_ext.continuity.data_order import order_in_another_loop
from mcore_ckpt_ext.continuity.order_change import DataOrder
from mcore_ckpt_ext.megatron.core_facts import decision_on_request, finds_request, serves
from mcore_ckpt_ext.megatron.decision_phases import ASSESSMENT, PARAMETER_ORDER, AssessedResume
from mcore_ckpt_ext.megatron.live.arguments import chunks_of, live_arguments
from mcore_ckpt_ext.megatron.live.phases import Phase, Who
from mcore_ckpt_ext.megatron.load_assessment import LoadAssessment
from mcore_ckpt_ext.megatron.load_request import LoadRequest
from mcore_ckpt_ext.megatron.required_order import check_required_order
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.optimizer_reshard import LiveRank


@dataclass
class CoreResume(AssessedResume):
    """A load of one optimizer by a loop on Megatron Core, as far as its phases have brought it.

    Attributes:
        is_served: True if this package can fill the optimizer of the first rank, which decides.
        fits: True if every rank finds the arrays that it requests, of equal sizes.
        data: whether the data goes on in the same order; None before it is compared.
        lacks_weights: True if the folder has no weights, with which masters could be compared beforehand.
    """

    is_served: bool = field(default=False, init=False)
    fits: bool = field(default=False, init=False)
    data: DataOrder | None = field(default=None, init=False)
    lacks_weights: bool = field(default=False, init=False)


class _Look(NamedTuple):
    """The part of one rank in the decision."""

    is_served: bool
    finds_request: bool


class CoreRank(LiveRank):
    """This rank's part of a load by a loop on Megatron Core."""

    def __init__(self, request: LoadRequest) -> None:
        """Args: the sharded state dict of the optimizer."""
        super().__init__((), request.optimizer)
        self._request = request

    def look(self, resume: CoreResume) -> _Look:
        """Read the live model, and compare what this rank requests with the checkpoint."""
        is_served = serves(self._optimizer)
        if is_served:
            self._chunks = chunks_of(self._optimizer)
            resume.running = live_arguments(self._chunks, self._optimizer)
        return _Look(is_served, finds_request(resume.session, self._request))

    def assess(self, resume: CoreResume) -> LoadAssessment | None:
        """Assess the checkpoint for the live optimizer, on the first rank.

        Raises:
            CheckpointError: the job cannot resume the checkpoint, whatever its optimizer is.
        """
        if not (is_first_rank() and resume.is_served):
            return None
        session = resume.session
        decision = decision_on_request(session, self._optimizer, resume.running, fits=resume.fits)
        return LoadAssessment(session.folder, decision)


def _take_looks(resume: CoreResume, performer: CoreRank, looks: Sequence[_Look]) -> None:
    resume.is_served = looks[0].is_served
    resume.fits = all(look.finds_request for look in looks)


def _account_data(resume: CoreResume) -> DataOrder:
    """Return whether the data goes on in the same order.

    Raises:
        ModelMismatchError: it does not, or that is unknown, and the user requires it.
    """
    order = order_in_another_loop(resume.session.checkpoint.job.arguments(), resume.running)
    check_required_order(order, None, resume.session.folder)
    return order


def _take_data(resume: CoreResume, performer: CoreRank, orders: Sequence[DataOrder]) -> None:
    resume.data = orders[0]


def _take_lack_of_weights(resume: CoreResume, performer: CoreRank, lacks: Sequence[bool]) -> None:
    resume.lacks_weights = lacks[0]


DECIDING = (
    Phase(
        "looking at the requested arrays",
        Who.EACH_RANK,
        lambda resume, performer: performer.look(resume),
        collect=_take_looks,
    ),
    Phase(
        "comparing the order of the data",
        Who.FIRST_RANK,
        _account_data,
        collect=_take_data,
        applies=lambda resume: resume.is_served,
    ),
    ASSESSMENT,
    Phase(
        "looking at the weights",
        Who.FIRST_RANK,
        lambda resume: not resume.session.checkpoint.names(WEIGHT),
        collect=_take_lack_of_weights,
        applies=lambda resume: resume.is_served,
    ),
    *PARAMETER_ORDER,
)
"""Who loads the optimizer?"""
