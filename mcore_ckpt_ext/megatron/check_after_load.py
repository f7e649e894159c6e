"""After every load, whoever did it: unless the live optimizer's masters match its weights, training does not begin.

Megatron itself leaves others in some cases: CPU-offloaded masters that nobody set from the weights after `--finetune`
(before core_v0.14), a `fully_reshardable` state that it wrote shifted (formats of 0.15 to 0.19). The next step would
overwrite every weight with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.collectives import gather, listed_of_all
from mcore_ckpt_ext.errors import ProofError, UnsupportedCheckpointError
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.master_check import Proof
from mcore_ckpt_ext.megatron.live.master_check import STRETCH, LiveMismatch, live_mismatches
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import any_keeps_remainders
from mcore_ckpt_ext.optimizer_reshard import prepare
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.settings import ACCEPT_LOST, PROOF, WARN

_SHOWN = 3
# One in how many stretches is looked at (`live_mismatches`): what this package has filled is already proven in full.
_OF_STOCK, _OF_OURS = 3, 8
PROVEN = f"masters verified against their weights, one of every {_OF_STOCK} stretches of {STRETCH:,} elements"
"""What `prove_loaded` has shown, where this package did not fill the optimizer."""


@dataclass(frozen=True)
class _Comparison:
    """The result of one rank.

    Attributes:
        found: None where it could not look, or has loaded nothing.
        problem: why it could not.
        beside_remainders: its masters are joined from weights and remainders, so that there is nothing to see.
    """

    found: list[LiveMismatch] | None
    problem: str | None
    beside_remainders: bool


class WriteDetector:
    """Sees whether anything has been loaded into the weights since it was made: torch counts every write."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._versions = {id(p): p._version for p in _parameters(chunks)}

    def detects_load(self, chunks: Sequence[Any]) -> bool:
        """Whether a parameter has been written to."""
        return any(p._version != self._versions.get(id(p)) for p in _parameters(chunks))


def prove_loaded(chunks: Sequence[Any], optimizer: Any, loaded: bool, weaker: Proof | None) -> bool:
    """Stop the job where masters do not round to their weights, or say so; collective.

    It costs less than 2 % of a load: of large parameters every third stretch is looked at, see `live_mismatches`.

    Args:
        chunks: the unwrapped model chunks.
        optimizer: the live optimizer.
        loaded: whether this rank has loaded anything.
        weaker: see `live_mismatches`; None where it was not this package that filled the optimizer.

    Returns:
        Whether every rank could look, at all masters, and found nothing. Beside remainders there is nothing to see.

    Raises:
        ProofError: on every rank, naming the parameters.
    """
    every = _OF_STOCK if weaker is None else _OF_OURS
    comparisons = _comparisons(chunks, optimizer, loaded, weaker, every)
    found = [item for comparison in comparisons for item in comparison.found or ()]
    if not found:
        return all(comparison.found is not None and not comparison.beside_remainders for comparison in comparisons)
    names = list(dict.fromkeys(item.name for item in found))
    more = f"; and {len(names) - _SHOWN} more parameters" if len(names) > _SHOWN else ""
    error = ProofError(
        f"after this load {len(names)} parameters have masters that do not round to their weights: the first step "
        "would overwrite the weights with something else",
        found="; ".join(str(next(item for item in found if item.name == name)) for name in names[:_SHOWN]) + more,
        expected="every master rounds to its weight, bit for bit; of masters in CPU memory, one of every "
        f"{every} stretches of {STRETCH:,} elements was compared",
        hint="resume from another iteration, or with --no-load-optim; if you know that the masters are right, "
        f"set {PROOF.name}={WARN}",
    )
    if PROOF.value != WARN:
        raise error
    announce(f"{PROOF.name}={WARN}: {error}")
    return False


def repair_shifted(folder: Path, chunks: Sequence[Any], optimizer: Any, arguments: Any) -> None:
    """Repair masters that Megatron stored under wrong names, where its own load shows it; collective.

    The bug is described in `optimizers/workarounds/fully_reshardable_padding.py`.
    """
    names = {
        item.name for comparison in _comparisons(chunks, optimizer, loaded=True) for item in comparison.found or ()
    }
    if not names:
        return
    running = JobArguments.of(vars(arguments))
    prepared = prepare(folder, chunks, optimizer, running, accept_lost=ACCEPT_LOST.value)
    proven = prepared.prove()
    lost = f", {prepared.lost_elements} lost elements took their weights, with zero moments"
    repaired = f"{len(names)} parameters of this checkpoint were written shifted by Megatron and are repaired"
    announce(f"{repaired}{lost if prepared.lost_elements else ''}; {proven.fill()}")


def _comparisons(
    chunks: Sequence[Any], optimizer: Any, loaded: bool, weaker: Proof | None = None, every: int = 1
) -> list[_Comparison]:
    """The results of all ranks; a failing check must not end a load that has worked."""
    own: list[LiveMismatch] | None = None
    problem: str | None = None
    try:
        own = live_mismatches(chunks, optimizer, weaker, every) if loaded else None
    except UnsupportedCheckpointError as error:
        problem = f"this version cannot check the optimizer: {error.found}"
    except Exception as error:  # noqa: BLE001 - see the docstring
        problem = f"{type(error).__name__}: {error}"
    comparisons = gather(_Comparison(own, problem, any_keeps_remainders(optimizer)))
    if problems := listed_of_all([comparison.problem for comparison in comparisons]):
        announce(f"this load is not verified: {problems}")
    return comparisons


def _parameters(chunks: Sequence[Any]) -> Iterator[Any]:
    for chunk in chunks:
        yield from chunk.parameters()
