"""Optimizer state that no weight can prove is refused with the reason: fp8 primary weights, masters in half precision.

Both need a GPU to be written. The real checkpoints here are edited to what those jobs write: keys and dtypes of the
index, and the job's arguments.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.online.homes.recognition import check_supported
from mcore_ckpt_ext.optimizers.refusals import is_master
from tests.harness.checkpoints import Fixture, fixture_named

FORMATS = ["p01", "p04", "p10"]


@pytest.fixture(params=FORMATS)
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Fixture:
    """A private copy: dp_reshardable of two versions, and fully_reshardable."""
    return fixture_named(request.param).copy_to(tmp_path / "copy")


def edit_index(fixture: Fixture, key: Callable[[str], str], dtype: torch.dtype | None = None) -> None:
    """Rename the arrays and objects of `.metadata`; give masters another dtype."""
    path = fixture.iteration / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    described = {key(name): entry for name, entry in metadata.state_dict_metadata.items()}
    for name, entry in described.items():
        if dtype is not None and is_master(name):
            entry.properties.dtype = dtype
    metadata.state_dict_metadata = described
    metadata.storage_data = {
        replace(index, fqn=key(index.fqn)): info for index, info in metadata.storage_data.items()
    }
    path.write_bytes(pickle.dumps(metadata))


def refused(checkpoint: Checkpoint, says: str) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=says):
        checkpoint.names("fp32_param")
    assert checkpoint.tensor("weight", "decoder.final_layernorm.weight").read().shape == (32,)


def test_an_edit_that_changes_nothing_is_read(copied: Fixture) -> None:
    """Negative control."""
    edit_index(copied, lambda key: key, torch.float32)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    values = open_checkpoint(copied.run).tensor("exp_avg", name).read()
    assert torch.equal(values, copied.truth[f"exp_avg.{name}"])


def test_buffers_of_quantised_parameters(tmp_path: Path) -> None:
    fixture = fixture_named("p10").copy_to(tmp_path / "copy")
    edit_index(fixture, lambda key: key.replace("(torch.bfloat16, ", "(torch.uint8, "))
    refused(open_checkpoint(fixture.run), "no weight is the plain rounding.*torch.uint8: fp8 or fp4 primary weights")


def test_masters_in_half_precision(copied: Fixture) -> None:
    edit_index(copied, lambda key: key, torch.float16)
    refused(open_checkpoint(copied.run), "masters of float16")


@pytest.mark.parametrize("argument", ["fp8_param_gather", "fp4_param_gather"])
def test_arguments_of_quantised_weights(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats in model space do not show it otherwise."""
    checkpoint = open_checkpoint(fixture_named("p04").run)
    setattr(checkpoint.common["args"], argument, True)
    refused(checkpoint, f"{argument} in the arguments")


def test_a_precision_aware_optimizer_with_whole_masters_is_read() -> None:
    """It stores what any other does (`get_unscaled_state`); only its arguments tell."""
    fixture = fixture_named("p10")
    checkpoint = open_checkpoint(fixture.run)
    checkpoint.common["args"].use_precision_aware_optimizer = True
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    assert torch.equal(checkpoint.tensor("fp32_param", name).read(), fixture.truth[f"fp32_param.{name}"])


def live(**changes: Any) -> Any:
    """As much of a live DistributedOptimizer as the check looks at."""
    plain = {
        "config": SimpleNamespace(use_precision_aware_optimizer=False),
        "optimizer": SimpleNamespace(),
        "gbuf_ranges": [{(torch.bfloat16, torch.float32): []}],
    }
    return SimpleNamespace(**{**plain, **changes})


def test_live_optimizers_that_no_weight_proves_are_refused() -> None:
    check_supported([live()])
    with pytest.raises(UnsupportedCheckpointError, match="fp8 or fp4 primary weights"):
        check_supported([live(), live(gbuf_ranges=[{(torch.uint8, torch.float32): []}])])


def test_arguments_of_quantised_weights_in_legacy_files() -> None:
    checkpoint = open_checkpoint(fixture_named("p08b").run)
    checkpoint.common["args"].fp8_param_gather = True
    refused(checkpoint, "fp8_param_gather in the arguments")


@pytest.mark.parametrize("implementation", [{"moe_use_legacy_grouped_gemm": True}, {"transformer_impl": "local"}])
def test_transposed_experts(implementation: dict[str, Any]) -> None:
    """GroupedMLP: weights are stored as anybody's, the flat optimizer state is transposed."""
    checkpoint = open_checkpoint(fixture_named("p09").run)
    arguments = {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": False, **implementation}
    vars(checkpoint.common["args"]).update(arguments)
    refused(checkpoint, "transposed, and the weights are not.*--dist-ckpt-optim-fully-reshardable")
