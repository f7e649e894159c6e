"""The phases of a load by a loop on Megatron Core, in order, and a rank's part in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mcore_ckpt_ext.continuity.data_order import order_in_another_loop
from mcore_ckpt_ext.continuity.order_change import DataOrder
from mcore_ckpt_ext.errors import UnsupportedCheckpointError, format_ranks
from mcore_ckpt_ext.megatron.core_facts import decision_on_request, finds_request, serves
from mcore_ckpt_ext.megatron.decision_phases import ASSESSMENT, PARAMETER_ORDER, AssessedResume
from mcore_ckpt_ext.megatron.live.arguments import chunks_of, live_arguments
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain
from mcore_ckpt_ext.megatron.live.phases import Phase, Who
from mcore_ckpt_ext.megatron.load_assessment import LoadAssessment
from mcore_ckpt_ext.megatron.load_request import LoadRequest
from mcore_ckpt_ext.megatron.param_group_compat import shifts_groups
from mcore_ckpt_ext.megatron.required_order import check_required_order
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.optimizer_reshard import LiveRank

_CALL = (
    "call mcore_ckpt_ext.load_optimizer(path, model, optimizer) on every rank, once the weights are loaded, in place "
    "of loading the optimizer's state"
)


@dataclass
class CoreResume(AssessedResume):
    """A load of one optimizer by a loop on Megatron Core, as far as its phases have brought it.

    Attributes:
        is_served: True if this package can fill the optimizers of all ranks.
        fits: True if every rank finds the arrays that it requests, of equal sizes.
        absent: the ranks that request no optimizer, while others do.
        data: whether the data goes on in the same order; None before it is compared.
        lacks_weights: True if the folder has no weights, with which masters could be compared beforehand.
    """

    is_served: bool = field(default=False, init=False)
    fits: bool = field(default=False, init=False)
    absent: Sequence[int] = field(default=(), init=False)
    data: DataOrder | None = field(default=None, init=False)
    lacks_weights: bool = field(default=False, init=False)


class _Look(NamedTuple):
    """The part of one rank in the decision."""

    has_request: bool
    is_served: bool
    finds_request: bool


class CoreRank(LiveRank):
    """This rank's part of a load by a loop on Megatron Core."""

    def __init__(self, request: LoadRequest | None) -> None:
        """Args: the sharded state dict of the optimizer; None if only other ranks request one."""
        super().__init__((), None if request is None else request.optimizer)
        self._request = request

    def look(self, resume: CoreResume) -> _Look:
        """Read the live model, and compare what this rank requests with the checkpoint.

        Raises:
            UnsupportedCheckpointError: Megatron would mix up the masters, and this package cannot fill them here.
        """
        if self._request is None:
            return _Look(has_request=False, is_served=True, finds_request=True)
        if serves(self._optimizer):
            self._chunks = chunks_of(self._optimizer)
            resume.running = live_arguments(self._chunks, self._optimizer)
            return _Look(has_request=True, is_served=True, finds_request=finds_request(resume.session, self._request))
        if shifts_groups(Chain.of(self._optimizer)):
            raise UnsupportedCheckpointError(
                "Megatron would copy the optimizer's masters into other parameters",
                found="a parameter group that has none on this pipeline stage, before others of the same optimizer",
                where=str(resume.session.folder),
                hint=_CALL,
            )
        return _Look(has_request=True, is_served=False, finds_request=True)

    def assess(self, resume: CoreResume) -> LoadAssessment | None:
        """Assess the checkpoint for the live optimizer.

        Raises:
            CheckpointError: the job cannot resume the checkpoint, whatever its optimizer is.
        """
        if self._request is None or not resume.is_served:
            return None
        session = resume.session
        decision = decision_on_request(session, self._optimizer, resume.running, fits=resume.fits)
        return LoadAssessment(session.folder, decision)

    def packs_otherwise(self, recorded: Mapping[tuple[int, int], str]) -> bool:
        """Return True if a sidecar gives parameters other places in this rank's buffers."""
        return self._request is not None and super().packs_otherwise(recorded)


def _take_looks(resume: CoreResume, performer: CoreRank, looks: Sequence[_Look]) -> None:
    resume.is_served = all(look.is_served for look in looks)
    resume.fits = all(look.finds_request for look in looks)
    resume.absent = [rank for rank, look in enumerate(looks) if not look.has_request]


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


def _lacks_ranks(resume: CoreResume) -> bool:
    """Return True if this package has to fill an optimizer that some ranks do not request."""
    return bool(resume.absent) and resume.assessment is not None and not resume.assessment.decision.is_stock


def _refuse_without_ranks(resume: CoreResume) -> None:
    """Refuse: the absent ranks would not take part.

    Programs pass over a rank's optimizer that trains no parameter: a stub, whose `sharded_state_dict` cannot be called
    (`MegatronOptimizer.is_stub_optimizer`, core_v0.12.1 to 0.19.2). They would not pass a loaded state to it either.

    Raises:
        UnsupportedCheckpointError: always.
    """
    raise UnsupportedCheckpointError(
        "Megatron cannot load this optimizer, and some ranks have no optimizer",
        found=f"no optimizer on rank {format_ranks(resume.absent)}, as happens if a rank trains no parameter",
        where=str(resume.session.folder),
        hint=_CALL,
    )


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
    Phase("looking at the checkpoint", Who.FIRST_RANK, _refuse_without_ranks, applies=_lacks_ranks),
)
"""Who loads the optimizer?"""
