"""Test what is said where another release of Megatron computes something else under the same flags.

With MEGATRON_LM_PATH, a checkout saves and the installed release resumes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt_ext.job.releases import PASSES_ON_INTERPOLATION
from tests.harness.checkouts import checkout_job, release_of, with_checkout
from tests.harness.jobs import SAVED, resume, train_and_save
from tests.harness.layouts import Layout
from tests.harness.models import GATED

pytestmark = pytest.mark.nightly


@with_checkout
@pytest.mark.parametrize("target", [Layout(1, 1, 2), Layout(2, 1, 2)], ids=["same layout", "another layout"])
def test_positions_that_only_one_release_interpolates(target: Layout, tmp_path: Path) -> None:
    model = [*GATED, "--rotary-seq-len-interpolation-factor", "8"]
    saved = train_and_save(tmp_path / "saved", Layout(1, 1, 2), until=SAVED + 1, more=model, **checkout_job())
    resumed = resume(tmp_path / "resumed", target, saved.run, more=model)
    said = "not the same training: --rotary-seq-len-interpolation-factor: Megatron applies it since 0.19"
    is_changed = not PASSES_ON_INTERPOLATION.is_of(release_of(True))
    assert any(said in line for line in resumed.said) == is_changed
    difference = abs(resumed.losses[SAVED + 1] / saved.losses[SAVED + 1] - 1)
    assert (difference > 1e-4) == is_changed
