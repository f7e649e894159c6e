"""Test that all accounts of a resume under the layout of the save take less than ten milliseconds."""

from __future__ import annotations

import time

import pytest

from mcore_ckpt_ext.continuity.data_order import data_order, followed_history
from mcore_ckpt_ext.continuity.mathematics import SAME_TRAINING, differences_of_jobs, sentence_of
from mcore_ckpt_ext.continuity.order_change import SAME_ORDER
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.versions import NEWEST
from tests.harness.checkpoints import fixture_named

_RAMP = {"rampup_batch_size": ["8", "8", "100000"], "global_batch_size": 8192}


@pytest.mark.parametrize("ramp", [{}, _RAMP], ids=["constant batch size", "ramp of a thousand sizes"])
@pytest.mark.parametrize("loader", ["single", "cyclic"])
def test_an_unchanged_resume_pays_less_than_ten_milliseconds(loader: str, ramp: dict[str, object]) -> None:
    """By the time of the processor, so that others on the machine do not count."""
    job = open_checkpoint(fixture_named("p10").iteration).arguments.replace(dataloader_type=loader, **ramp)
    started = time.process_time()
    order = data_order(job, job)
    history = followed_history(job, job)
    mathematics = sentence_of(differences_of_jobs(job, job, NEWEST))
    assert time.process_time() - started < 0.010
    assert (order.verdict, len(history), mathematics) == (SAME_ORDER, loader == "cyclic", SAME_TRAINING)
