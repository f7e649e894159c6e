"""Test loads by Megatron Core itself, without process groups; `tests/jobs/test_own_loops.py` has those with ranks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import megatron.core
import pytest
from megatron.core import dist_checkpointing

from mcore_ckpt_ext.continuity.data_order import order_in_another_loop
from mcore_ckpt_ext.errors import ModelMismatchError, UnsupportedCheckpointError
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron import core_load
from mcore_ckpt_ext.megatron.core_load import wrap_load, wrap_load_state_dict
from mcore_ckpt_ext.megatron.load_request import LoadPlan
from mcore_ckpt_ext.megatron.required_order import check_required_order
from tests.harness.checkpoints import fixture_named

_UNKNOWN = order_in_another_loop(JobArguments.of({}, is_complete=False), JobArguments.of({}))


def test_an_earlier_megatron_is_told_how_to_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.19 it ends with an error about `common.pt`, which p10 lacks."""
    monkeypatch.setattr(megatron.core, "__version__", "0.16.1")
    folder = fixture_named("p10").iteration
    with pytest.raises(UnsupportedCheckpointError, match="later release") as caught:
        wrap_load(dist_checkpointing.load)({}, str(folder))
    assert caught.value.details["hint"].endswith(f"{folder} OUTPUT --to torch_dist --megatron-version 0.16")


def test_the_order_of_the_data_of_another_loop_is_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(core_load, "announce", said.append)
    plan = LoadPlan()
    plan.order = _UNKNOWN
    plan.prepared = SimpleNamespace(prove=lambda: SimpleNamespace(fill=lambda: "optimizer resumed"))
    wrap_load_state_dict(lambda optimizer, state: pytest.fail("called"))(None, plan)
    (line,) = said
    assert line.startswith("optimizer resumed; data: goes on at an unknown sample, not known whether in the same order")


@pytest.mark.parametrize("required", [True, False])
def test_an_unknown_order_is_refused_if_the_user_requires_the_same(
    required: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MCORE_CKPT_EXT_DATA_ORDER", "required" if required else "warn")
    refusal = pytest.raises(ModelMismatchError, match="or that is unknown") if required else nullcontext()
    with refusal as caught:
        check_required_order(_UNKNOWN, None, tmp_path)
    assert caught is None or "MCORE_CKPT_EXT_DATA_ORDER" in caught.value.details["expected"]
