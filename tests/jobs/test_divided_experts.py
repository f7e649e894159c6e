"""Test what is said of experts whose tensor-parallel size is not that of the rest, without expert parallelism.

Before 0.19 Megatron reduces their gradients wrongly. With MEGATRON_LM_PATH, a checkout runs the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt_ext.job.releases import SEPARATES_DIVIDED_EXPERTS
from mcore_ckpt_ext.operations.verification import verify
from tests.harness.checkouts import EITHER, checkout_job, release_of
from tests.harness.jobs import SAVED, train_and_save
from tests.harness.layouts import SEQUENCE, Layout, expert_sizes
from tests.harness.models import GATED_EXPERTS

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("checkout", EITHER)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(2, 1, 4, more=(*SEQUENCE, *expert_sizes(1, 1))), id="copies"),
        pytest.param(Layout(1, 1, 4, more=expert_sizes(1, 2)), id="parts"),
    ],
)
def test_what_the_optimizer_lacks_is_explained(layout: Layout, checkout: bool, tmp_path: Path) -> None:
    job = checkout_job() if checkout else {}
    saved = train_and_save(tmp_path, layout, until=SAVED, more=GATED_EXPERTS, **job)
    found = verify(saved.run)
    if SEPARATES_DIVIDED_EXPERTS.is_of(release_of(checkout)):
        assert found.sound
    else:
        reason = "the optimizer does not have every expert once: before 0.19,"
        assert any(finding.what.startswith(reason) for finding in found.findings)
