"""Test the evidence whether live masters match the live weights."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.megatron.loaded_masters import MasterEvidence


@pytest.mark.parametrize(("matching", "differing", "is_contradictory"), [
    (["a"], ["b"], True), (["a"], [], False), ([], ["b"], False),
])  # fmt: skip
def test_a_job_of_one_rank_has_the_evidence_of_that_rank(
    matching: list[str], differing: list[str], is_contradictory: bool
) -> None:
    own = MasterEvidence(matching, differing)
    assert MasterEvidence.from_all_ranks(own) == own
    assert own.is_contradictory is is_contradictory
