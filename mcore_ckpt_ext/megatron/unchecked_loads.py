"""Checks loads by Megatron Core from folders without weights, after they are done.

Before such a load nothing shows to which parameters the masters belong: the live weights do, if they are loaded first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from mcore_ckpt_ext.collectives import agree_here
from mcore_ckpt_ext.errors import ResumeRefusedError, join_some, quantity
from mcore_ckpt_ext.megatron.live.arguments import chunks_of, live_arguments
from mcore_ckpt_ext.megatron.live.resume import ResumeOptions
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.loaded_masters import MasterEvidence
from mcore_ckpt_ext.optimizer_reshard import prepare
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.settings import ACCEPT_LOST, PROOF, WARN

_FILLED = "Megatron has already filled the optimizer: do not train on, start again"


class UncheckedLoads:
    """The optimizers that Megatron Core loads from a folder that has no weights."""

    def __init__(self) -> None:
        self._folders: WeakKeyDictionary[Any, Path] = WeakKeyDictionary()

    def add(self, optimizer: Any, folder: Path) -> None:
        """Record that Megatron Core is about to load an optimizer from a folder."""
        self._folders[optimizer] = folder

    def check(self, optimizer: Any) -> None:
        """Compare samples of the masters of a recorded optimizer with the live weights. Collective.

        If some match the live weights and others do not, the state belongs to another layout or was written shifted:
        this package then fills the optimizer and compares every master. If none matches, the weights are not loaded
        yet, and there is nothing to compare with.

        Raises:
            ResumeRefusedError: on every rank, if masters differ and this package cannot fill the optimizer either.
        """
        folder = self._folders.pop(optimizer, None)
        if folder is None:
            return
        chunks = chunks_of(optimizer)
        evidence = MasterEvidence.from_all_ranks(
            agree_here("comparing masters with weights", lambda: MasterEvidence.of(chunks, optimizer), _FILLED)
        )
        if not evidence.is_contradictory:
            if evidence.differing:
                announce(
                    f"the optimizer of {folder} is loaded by Megatron and not verified: the live weights are not those "
                    "of its masters, for example because they are loaded later"
                )
            return
        try:
            running = live_arguments(chunks, optimizer)
            options = ResumeOptions(accept_lost=ACCEPT_LOST.value)
            proven = prepare(LoadSession(folder), chunks, optimizer, running, options).prove()
        except ResumeRefusedError as error:
            refusal = ResumeRefusedError(
                f"the optimizer's masters belong to other parameters; {_FILLED}\n  {error}\n  ",
                found=f"{quantity(len(evidence.differing), 'parameter')}, {join_some(evidence.differing)}",
                expected="masters that round to the live weights, as those of the other parameters do",
                where=str(folder),
                hint="load the weights of the same checkpoint before its optimizer",
            )
            if PROOF.value != WARN:
                raise refusal from error
            announce(f"{PROOF.name}={WARN}: {refusal}")
            return
        announce(f"Megatron loaded masters of other parameters, which are replaced; {proven.fill()}")
