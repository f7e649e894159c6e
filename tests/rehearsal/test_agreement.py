"""Test what a rehearsal takes for a refusal of the job's ranks."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.errors import CheckpointError, LostProcessError, StorageError, UnreadableCheckpointError
from mcore_ckpt_ext.rehearsal.agreement import RefusedError, SimulatedCommunicator, run_by_rank


@pytest.mark.parametrize(
    ("error", "raised"),
    [(UnreadableCheckpointError, RefusedError), (StorageError, StorageError), (LostProcessError, LostProcessError)],
    ids=lambda kind: kind.__name__,
)
def test_only_errors_of_the_checkpoint_are_refusals(error: type[CheckpointError], raised: type[Exception]) -> None:
    def work(*rank: int) -> None:
        raise error("it has ended")

    with pytest.raises(raised, match="it has ended"):
        SimulatedCommunicator(2).agree(work, "planning the resume")
    with pytest.raises(raised, match="it has ended"):
        run_by_rank("planning the resume", 2, work)
