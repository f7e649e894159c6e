"""Test which loads of Megatron's loop this package looks at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt_ext.megatron.load import _resumes_optimizer

TRAINS = {
    "no_load_optim": False, "finetune": False, "use_distributed_optimizer": True, "ckpt_format": "torch_dist",
}  # fmt: skip
OPTIMIZER = SimpleNamespace(gbuf_ranges=[])


@pytest.mark.parametrize(("changed", "resumes"), [
    ({}, True),
    ({"no_load_optim": True}, False),
    ({"finetune": True}, False),
    ({"use_distributed_optimizer": False}, False),
    ({"ckpt_format": "torch"}, True),
    ({"ckpt_format": "zarr"}, False),
    ({"ckpt_format": "zarr", "auto_detect_ckpt_format": True}, True),
])  # fmt: skip
def test_an_optimizer_is_resumed_if_the_job_loads_it_from_a_format_that_is_read(
    changed: dict[str, Any], resumes: bool
) -> None:
    scope = {"get_args": lambda: SimpleNamespace(**TRAINS | changed)}
    assert _resumes_optimizer(scope, OPTIMIZER) == resumes
    assert not _resumes_optimizer(scope, None)
    assert not _resumes_optimizer(scope, SimpleNamespace())  # an optimizer of an unknown kind
