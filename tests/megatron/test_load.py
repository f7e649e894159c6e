"""Test which loads of Megatron's loop this package looks at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt_ext.megatron import load
from mcore_ckpt_ext.megatron.live.resume import changed_padding
from mcore_ckpt_ext.megatron.load import _resumes_optimizer, wrap_load_checkpoint

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
    arguments = SimpleNamespace(**TRAINS | changed)
    assert _resumes_optimizer(arguments, OPTIMIZER) == resumes
    assert not _resumes_optimizer(arguments, None)
    assert not _resumes_optimizer(arguments, SimpleNamespace())  # an optimizer of an unknown kind


@pytest.mark.parametrize("name", ["model", "ddp_model"])
def test_the_model_may_have_its_former_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--moe-use-upcycling` passes it so; Megatron itself fails."""
    monkeypatch.setattr(load, "_LoadCall", lambda *given: SimpleNamespace(run=lambda: given))
    call = {name: "the model", "optimizer": "optimizer", "opt_param_scheduler": "scheduler", "strict": False}
    assert wrap_load_checkpoint(max)(**call) == (max, "the model", "optimizer", "scheduler", (), {"strict": False})


@pytest.mark.parametrize(
    ("stored", "rows", "says"),
    [(256, 128, "padded to 128 rows, 256 in the checkpoint"), (128, 128, ""), (None, 128, ""), (128, None, "")],
)
def test_a_change_of_the_padding_is_named(stored: int | None, rows: int | None, says: str) -> None:
    found = changed_padding(stored, rows)
    assert says in found
    assert bool(found) == bool(says)
