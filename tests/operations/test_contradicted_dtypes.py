"""Test that a dtype of the same size, which no checksum contradicts, is refused in every format."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.model_space.tensors import contradicts_kind
from mcore_ckpt_ext.operations.verification import verify
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import MATRIX, without_digests


@pytest.mark.parametrize(
    ("kind", "dtype", "contradicted"),
    [
        ("exp_avg", "float32", False),
        ("exp_avg", "bfloat16", False),
        ("exp_avg", "uint8", False),
        ("exp_avg", "int32", True),
        ("exp_avg_sq", "bool", True),
        ("fp32_param", "int32", True),
        ("param_remainder", "int16", False),
        ("param_remainder", "float16", True),
        ("weight", "float8_e4m3fn", False),
        ("weight", "int16", True),
        ("momentum_buffer", "int64", False),
    ],
)
def test_dtypes_of_kinds(kind: str, dtype: str, contradicted: bool) -> None:
    assert contradicts_kind(kind, dtype) is contradicted


def refused(run: Path, folder: Path, *, quick: bool = True) -> None:
    found = verify(run, quick=quick)
    assert not found.sound
    assert any("int32" in finding.what for finding in found.findings), found.findings
    with pytest.raises(UnreadableCheckpointError, match="int32"):
        mcore_ckpt_ext.convert(run, folder, mcore_ckpt_ext.Canonical())


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq", "fp32_param"])
def test_in_the_header_of_safetensors(kind: str, tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "run", mcore_ckpt_ext.Canonical())
    for path in without_digests(tmp_path / "run").glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        if (key := f"{kind}.{MATRIX}") in header:
            header[key]["dtype"] = "I32"
            changed = json.dumps(header, separators=(",", ":")).encode()
            path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    refused(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize(("name", "state"), [("p04", "exp_avg"), ("p10", "exp_avg"), ("p10", "param")])
def test_in_the_index_of_distcp_files(name: str, state: str, tmp_path: Path) -> None:
    fixture = fixture_named(name).copy_to(tmp_path / name)
    path = fixture.iteration / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # torch's own classes: a file of these tests
    keys = [key for key in metadata.state_dict_metadata if state in key.split(".")]
    metadata.state_dict_metadata[keys[0]].properties.dtype = torch.int32
    path.write_bytes(pickle.dumps(metadata))
    refused(fixture.run, tmp_path / "out")


def test_in_the_index_of_fsdp_dtensor(tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "run", mcore_ckpt_ext.FsdpDtensor())
    (iteration,) = (tmp_path / "run").glob("iter_*")
    path = without_digests(iteration) / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # torch's own classes: a file of these tests
    key = next(key for key in metadata.state_dict_metadata if key.endswith("exp_avg"))
    metadata.state_dict_metadata[key].properties.dtype = torch.int32
    path.write_bytes(pickle.dumps(metadata))
    refused(tmp_path / "run", tmp_path / "out")


def test_in_legacy_files_without_checksums(tmp_path: Path) -> None:
    """The quick verification does not open them."""
    mcore_ckpt_ext.convert(
        fixture_named("p02").run,
        tmp_path / "run",
        mcore_ckpt_ext.Legacy(tensor_model_parallel_size=1, pipeline_model_parallel_size=1),
    )
    (path,) = (tmp_path / "run").rglob("distrib_optim.pt")
    without_digests(path.parents[1])
    state = torch.load(path, weights_only=False)
    buffer = next(iter(state[0].values()))
    buffer["exp_avg"] = buffer["exp_avg"].view(torch.int32)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, path)
    finally:
        torch.serialization.set_crc32_options(True)
    refused(tmp_path / "run", tmp_path / "out", quick=False)


def test_a_weight_in_the_other_half_precision(tmp_path: Path) -> None:
    """Without its master, nothing else contradicts it."""
    fixture = fixture_named("p33").copy_to(tmp_path / "p33")
    path = fixture.iteration / "decoder.final_layernorm.weight" / ".zarray"
    described = json.loads(path.read_text())
    assert described["dtype"] == "bfloat16"
    path.write_text(json.dumps({**described, "dtype": "<f2"}))
    said = "it is stored as float16, which the job does not train in"
    assert said in [finding.what for finding in verify(fixture.run, quick=True).findings]
    with pytest.raises(UnreadableCheckpointError, match=said):
        mcore_ckpt_ext.convert(fixture.run, tmp_path / "out", mcore_ckpt_ext.TorchDist(), drop=["optimizer"])
