"""Test that unverifiable optimizer state is refused, and that state of fp8 weights is verified within rounding.

A GPU is needed to write either. The real checkpoints here are edited to what those jobs write: keys and dtypes of the
index, and the job's arguments.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import PackingError, ProofError, UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.quantized import is_quantized
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import check_supported
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.optimizers.derived_masters import joined_masters
from mcore_ckpt_ext.optimizers.unsupported import is_master
from mcore_ckpt_ext.storage.torch_archive import TorchArchive
from mcore_ckpt_ext.transfer import read_slice
from tests.harness.checkpoints import Fixture, fixture_named
from tests.harness.damage import flip, payload_position, read_all

GATHERED = JobArguments.of({"fp8_param_gather": True})
FORMATS = ["p01", "p04", "p10"]


@pytest.fixture(params=FORMATS)
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Fixture:
    """A private copy: dp_reshardable of two versions, and fully_reshardable."""
    return fixture_named(request.param).copy_to(tmp_path / "copy")


def edit_index(
    fixture: Fixture,
    key: Callable[[str], str],
    dtype: torch.dtype | None = None,
    chosen: Callable[[str], bool] = is_master,
) -> None:
    """Rename the arrays and objects of `.metadata`; give the chosen ones, by default masters, another dtype."""
    path = fixture.iteration / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    described = {key(name): entry for name, entry in metadata.state_dict_metadata.items()}
    for name, entry in described.items():
        if dtype is not None and chosen(name):
            entry.properties.dtype = dtype
    metadata.state_dict_metadata = described
    metadata.storage_data = {replace(index, fqn=key(index.fqn)): info for index, info in metadata.storage_data.items()}
    path.write_bytes(pickle.dumps(metadata))


def refused(checkpoint: CheckpointView, says: str) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=says):
        checkpoint.names("fp32_param")
    assert checkpoint.tensor("weight", "decoder.final_layernorm.weight").read().shape == (32,)


def test_parameters_of_unknown_modules_that_content_does_not_place_are_refused(damaged: Fixture) -> None:
    """Not only as damaged: stock Megatron resumes such a model under its own layout."""
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    path, position = payload_position(open_checkpoint(damaged.run), "fp32_param", name, 0)
    flip(path, position + 3)
    edit_index(damaged, lambda name: name.replace("linear_fc2", "strange"))
    with pytest.raises(PackingError) as caught:
        read_all(damaged.run)
    found = str(caught.value.found)
    assert found.startswith("the local layer spec, ")
    assert found.count("it does not cover every parameter") == 1
    assert found.endswith("the search by content found no parameter whose weights match the masters at a place")
    assert "--dist-ckpt-optim-fully-reshardable" in caught.value.details["hint"]


def test_an_edit_that_changes_nothing_is_read(copied: Fixture) -> None:
    """Negative control."""
    edit_index(copied, lambda key: key, torch.float32)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    values = open_checkpoint(copied.run).tensor("exp_avg", name).read()
    assert torch.equal(values, copied.truth[f"exp_avg.{name}"])


@pytest.fixture
def as_if_written_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is edited below stands for what a job wrote, with checksums of its own."""
    monkeypatch.setattr(TorchArchive, "verify_checksums", lambda self, only=None: None)


def gathered_in_fp8(fixture: Fixture) -> Fixture:
    """What a job with fp8 weights has in its checkpoint: those of linear layers dequantized, and its arguments."""
    checkpoint = open_checkpoint(fixture.run)
    names = [name for name in checkpoint.names("weight") if is_quantized(name, GATHERED)]
    assert len(names) == 16
    for name in names:
        for stored in checkpoint.stored_slices("weight", name):
            values = read_slice(checkpoint, checkpoint.files.transfer, "weight", stored.slice).float()
            scale = 448 / values.abs().max()
            dequantized = ((values * scale).to(torch.float8_e4m3fn).float() / scale).bfloat16()
            payload = checkpoint.files.transfer.locate(stored.extent)
            with (checkpoint.files.folder / payload.file).open("r+b") as file:
                file.seek(payload.offset + 2 * stored.first)
                file.write(dequantized.view(torch.uint8).numpy().tobytes())
    with zipfile.ZipFile(fixture.iteration / "common.pt") as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(fixture.iteration / "common.pt", "w") as archive:
        for name, content in records.items():
            value = content.find(pickle.NEWFALSE, content.find(b"fp8_param_gather"))
            pickled = name.endswith("data.pkl")
            archive.writestr(name, content[:value] + pickle.NEWTRUE + content[value + 1 :] if pickled else content)
    assert open_checkpoint(fixture.run).job.arguments().fp8_param_gather
    return fixture


def proof_of_all(run: Path) -> tuple[list[str], list[str]]:
    """What `verify` says of the proof: how far it looked, and which parameters fail."""
    found = verify(run)
    fail = [finding.where for finding in found.findings if finding.check == "masters"]
    return [check.extent for check in found.checks if check.name == "masters"], fail


@pytest.mark.usefixtures("as_if_written_so")
def test_masters_of_fp8_weights_are_verified_within_their_rounding(tmp_path: Path) -> None:
    fixture = gathered_in_fp8(fixture_named("p04").copy_to(tmp_path / "copy"))
    (said,), fail = proof_of_all(fixture.run)
    assert said.endswith(" masters equal to their weights, within fp8 rounding of their weights")
    assert fail == []
    report = mcore_ckpt_ext.convert(fixture.run, tmp_path / "out", mcore_ckpt_ext.Canonical())
    assert report.proven_elements > 50_000
    assert report.how == "within fp8 rounding of their weights"
    written = mcore_ckpt_ext.open_checkpoint(tmp_path / "out")
    name = "fp32_param.decoder.layers.1.mlp.linear_fc1.weight"
    assert torch.equal(written.tensor(*name.split(".", 1)).read(), fixture.truth[name])


@pytest.mark.usefixtures("as_if_written_so")
def test_a_misplaced_master_of_fp8_weights(tmp_path: Path) -> None:
    fixture = gathered_in_fp8(fixture_named("p04").copy_to(tmp_path / "copy"))
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    path, position = payload_position(open_checkpoint(fixture.run), "fp32_param", name, 0)
    values = fixture.truth[f"fp32_param.{name}"].flatten()
    with path.open("r+b") as file:
        file.seek(position)
        file.write(values[1:65].numpy().tobytes())
    assert proof_of_all(fixture.run)[1] == [f"fp32_param {name}"]
    with pytest.raises(ProofError, match=f"is not within fp8 rounding of its weight.*{name}"):
        mcore_ckpt_ext.convert(fixture.run, tmp_path / "out", mcore_ckpt_ext.Canonical())


def test_buffers_of_quantized_parameters_in_a_job_that_has_none(tmp_path: Path) -> None:
    fixture = fixture_named("p10").copy_to(tmp_path / "copy")
    edit_index(fixture, lambda key: key.replace("(torch.bfloat16, ", "(torch.uint8, "))
    refused(open_checkpoint(fixture.run), "parameters of torch.uint8, in a job without fp8_param_gather or fp4")


def test_remainders_of_quantized_parameters() -> None:
    checkpoint = open_checkpoint(fixture_named("p47").run)
    checkpoint.job.common()["args"].fp8_param_gather = True
    refused(checkpoint, "remainders of bf16 weights as masters, in a job whose weights are fp8 or fp4")


def test_masters_in_half_precision(copied: Fixture) -> None:
    edit_index(copied, lambda key: key, torch.float16)
    refused(open_checkpoint(copied.run), "masters of float16")


def test_a_precision_aware_optimizer_with_whole_masters_is_read() -> None:
    """It stores what any other does (`get_unscaled_state`); only its arguments tell."""
    fixture = fixture_named("p10")
    checkpoint = open_checkpoint(fixture.run)
    checkpoint.job.common()["args"].use_precision_aware_optimizer = True
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


QUANTIZED: list[Any] = [{(torch.uint8, torch.float32): []}]


def test_live_masters_of_quantized_weights_must_be_plain() -> None:
    check_supported([live(), live(gbuf_ranges=QUANTIZED)])
    elsewhere = [
        {"config": SimpleNamespace(use_precision_aware_optimizer=True)},
        {"config": SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True)},
        {"optimizer": SimpleNamespace(sub_optimizers=[])},
    ]
    for changes in elsewhere:
        with pytest.raises(UnsupportedCheckpointError, match="fp8 or fp4 primary weights whose masters are in the"):
            check_supported([live(), live(gbuf_ranges=QUANTIZED, **changes)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8])
def test_moments_whose_scale_is_missing(copied: Fixture, dtype: torch.dtype) -> None:
    """Megatron stores them in fp32; numbers that were divided by a scale mean nothing without it."""
    edit_index(copied, lambda key: key, dtype, lambda key: "exp_avg" in key)
    name = str(dtype).removeprefix("torch.")
    refused(open_checkpoint(copied.run), f"moments of {name} without their scale: .*exp_avg")


@pytest.mark.parametrize(
    ("weight", "found"), [(None, "no weight"), (LogicalTensor("", (), "float16"), "a weight of float16")]
)
def test_remainders_without_the_weights_that_they_belong_to(weight: LogicalTensor | None, found: str) -> None:
    state = open_checkpoint(fixture_named("p47").run).optimizer.state()
    weights: Any = SimpleNamespace(logical_tensor=lambda kind, name: weight)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    says = f"which are missing; found: {found}; expected: a bfloat16 weight; where: {name}.*another iteration"
    with pytest.raises(UnreadableCheckpointError, match=says):
        joined_masters(state, weights).derivation("fp32_param", name)


@pytest.mark.parametrize("implementation", [{"moe_use_legacy_grouped_gemm": True}, {"transformer_impl": "local"}])
def test_transposed_experts(implementation: dict[str, Any]) -> None:
    """GroupedMLP: weights are stored as anybody's, the flat optimizer state is transposed."""
    checkpoint = open_checkpoint(fixture_named("p09").run)
    arguments = {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": False, **implementation}
    vars(checkpoint.job.common()["args"]).update(arguments)
    refused(checkpoint, "transposed, and their weights are not.*--dist-ckpt-optim-fully-reshardable")
