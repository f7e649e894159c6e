"""Checks after every load that the live masters match the weights; else training does not begin.

The check covers loads by stock Megatron, too, which in some cases leaves other masters: CPU-offloaded masters that are
not set from the weights after `--finetune` (before core_v0.14), and a `fully_reshardable` state that it wrote shifted
(formats of 0.15 to 0.19). The next step would overwrite every weight with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.collectives import gather, list_reasons_of_all
from mcore_ckpt_ext.errors import ProofError, UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.master_check import MasterCheck
from mcore_ckpt_ext.megatron.live.master_check import STRETCH, LiveMismatch, live_mismatches
from mcore_ckpt_ext.megatron.live.model import Chunks
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import any_keeps_remainders
from mcore_ckpt_ext.megatron.live.resume import ResumeOptions
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.optimizer_reshard import prepare
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.settings import ACCEPT_LOST, PROOF, WARN

_SHOWN = 3
# Compare one of this many stretches (`live_mismatches`); an optimizer that this package filled is already fully
# compared.
_EVERY_AFTER_STOCK = 3
_EVERY_AFTER_FILL = 8
PROVEN = f"masters verified against their weights, one of every {_EVERY_AFTER_STOCK} stretches of {STRETCH:,} elements"
"""The outcome of `prove_loaded` in a log line, if this package did not fill the optimizer."""


@dataclass(frozen=True)
class _Comparison:
    """The comparison of masters and weights on one rank.

    Attributes:
        found: the mismatches; None if the rank cannot compare or has loaded nothing.
        problem: why it cannot compare; None if it can.
        has_remainders: its masters are joined from weights and remainders, so that a comparison shows nothing.
    """

    found: list[LiveMismatch] | None
    problem: str | None
    has_remainders: bool


class WriteDetector:
    """Detects whether weights have been written since it was made, by torch's version counters."""

    def __init__(self, chunks: Chunks) -> None:
        self._versions = {id(p): p._version for p in _parameters(chunks)}

    def detects_load(self, chunks: Chunks) -> bool:
        """Return True if a parameter has been written to."""
        return any(p._version != self._versions.get(id(p)) for p in _parameters(chunks))


def prove_loaded(chunks: Chunks, optimizer: Any, loaded: bool, permitted: MasterCheck | None) -> bool:
    """Stop the job if masters do not round to their weights, or log a warning. Collective.

    It costs less than 2 % of a load, as only some stretches of large parameters are compared (see `live_mismatches`).

    Args:
        chunks: the unwrapped model chunks.
        optimizer: the live optimizer.
        loaded: True if this rank has loaded anything.
        permitted: see `live_mismatches`; None if this package did not fill the optimizer.

    Returns:
        True if every rank compared all of its masters without a mismatch; False if some masters are joined from
        weights and remainders.

    Raises:
        ProofError: on every rank, with the names of the parameters.
    """
    every = _EVERY_AFTER_STOCK if permitted is None else _EVERY_AFTER_FILL
    comparisons = _comparisons(chunks, optimizer, loaded, permitted, every)
    mismatches = [mismatch for comparison in comparisons for mismatch in comparison.found or ()]
    if not mismatches:
        return all(comparison.found is not None and not comparison.has_remainders for comparison in comparisons)
    names = list(dict.fromkeys(mismatch.name for mismatch in mismatches))
    more = f"; and {quantity(len(names) - _SHOWN, 'more parameter')}" if len(names) > _SHOWN else ""
    error = ProofError(
        f"after this load {quantity(len(names), 'parameter has', 'parameters have')} masters that do not round to "
        "their weights: the first step "
        "would overwrite the weights with something else",
        found="; ".join(
            str(next(mismatch for mismatch in mismatches if mismatch.name == name)) for name in names[:_SHOWN]
        )
        + more,
        expected="every master rounds to its weight, bit for bit; of masters in CPU memory, one of every "
        f"{every} stretches of {STRETCH:,} elements was compared",
        hint="resume from another iteration, or with --no-load-optim; if you know that the masters are right, "
        f"set {PROOF.name}={WARN}",
    )
    if PROOF.value != WARN:
        raise error
    announce(f"{PROOF.name}={WARN}: {error}")
    return False


def repair_shifted(session: LoadSession, chunks: Chunks, optimizer: Any, arguments: Any) -> None:
    """Repair masters that Megatron stored under wrong names, if its own load reveals it. Collective.

    The bug is described in `optimizers/workarounds/fully_reshardable_padding.py`.
    """
    names = {
        item.name for comparison in _comparisons(chunks, optimizer, loaded=True) for item in comparison.found or ()
    }
    if not names:
        return
    running = JobArguments.of(vars(arguments))
    prepared = prepare(session, chunks, optimizer, running, ResumeOptions(accept_lost=ACCEPT_LOST.value))
    proven = prepared.prove()
    elements = quantity(prepared.lost_elements, "lost element took its weight", "lost elements took their weights")
    lost = f", {elements}, with zero moments"
    repaired = f"repaired, because Megatron wrote them shifted: {quantity(len(names), 'parameter')} of this checkpoint"
    announce(f"{repaired}{lost if prepared.lost_elements else ''}; {proven.fill()}")


def _comparisons(
    chunks: Chunks, optimizer: Any, loaded: bool, permitted: MasterCheck | None = None, every: int = 1
) -> list[_Comparison]:
    """Return the comparisons of all ranks; an error in one does not end a load that has succeeded."""
    mismatches: list[LiveMismatch] | None = None
    problem: str | None = None
    try:
        mismatches = live_mismatches(chunks, optimizer, permitted, every) if loaded else None
    except UnsupportedCheckpointError as error:
        problem = f"this version cannot check the optimizer: {error.found}"
    except Exception as error:  # noqa: BLE001 - see the docstring
        problem = f"{type(error).__name__}: {error}"
    comparisons = gather(_Comparison(mismatches, problem, any_keeps_remainders(optimizer)))
    if problems := list_reasons_of_all([comparison.problem for comparison in comparisons]):
        # Rank 0 names all; the log of a rank that could not check says so, too.
        announce(f"this load is not verified: {problems}", every_rank=problem is not None)
    return comparisons


def _parameters(chunks: Chunks) -> Iterator[Any]:
    for chunk in chunks:
        yield from chunk.parameters()
