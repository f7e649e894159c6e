"""Test a job of Megatron-FSDP that loads another format: it gets the same as from the folder of `convert`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt_ext import FsdpDtensor
from mcore_ckpt_ext.errors import ProofError, ResumeRefusedError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.fsdp.writer import FsdpTarget
from mcore_ckpt_ext.megatron import fsdp_load
from mcore_ckpt_ext.megatron.fsdp_load import assess_fsdp, load_into_fsdp
from mcore_ckpt_ext.megatron.load_assessment import LoadAssessment
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.sources.virtual_storage_reader import VirtualStorageReader
from mcore_ckpt_ext.operations.block_reader import BlockReader
from mcore_ckpt_ext.operations.conversion import convert
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import flip, payload_position


def drafted(run: Path) -> tuple[VirtualStorageReader, BlockReader]:
    checkpoint = open_checkpoint(run)
    target, filler = (
        FsdpTarget(checkpoint, (0, 19), has_expert_optimizer=False),
        BlockReader(checkpoint, accept_lost=False),
    )
    return VirtualStorageReader({array.key: array for array in target.arrays()}, dict(target.objects()), filler), filler


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["p02", "p22", "p51"])
def test_the_same_as_from_what_convert_writes(name: str, tmp_path: Path) -> None:
    """Gated halves, experts, objects; every master is proven on the way."""
    run = fixture_named(name).run
    convert(run, tmp_path / "out", FsdpDtensor(megatron_version="0.19.0", expert_model_parallel_size=1))
    entries = dcp.FileSystemReader(tmp_path / "out" / "iter_0000004").read_metadata().state_dict_metadata
    asked = [
        {
            key: torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None
            for key, entry in entries.items()
        }
        for _ in range(2)
    ]
    reader, filler = drafted(run)
    dcp.load(asked[0], checkpoint_id=tmp_path / "out" / "iter_0000004")
    dcp.load(asked[1], storage_reader=reader)
    tensors = {key for key, value in asked[0].items() if isinstance(value, torch.Tensor)}
    assert all(torch.equal(asked[0][key], asked[1][key]) for key in tensors)
    assert all(asked[0][key] == asked[1][key] for key in asked[0].keys() - tensors)
    assert filler.proven == sum(asked[0][key].numel() for key in tensors if key.startswith("model."))
    assert reader.read_metadata().state_dict_metadata.keys() == entries.keys()


def test_a_master_that_is_not_that_of_its_weight(tmp_path: Path) -> None:
    copied = fixture_named("p33").copy_to(tmp_path / "copy")  # raw arrays, without checksums
    name = "decoder.final_layernorm.weight"
    path, position = payload_position(open_checkpoint(copied.run), "weight", name, 3)
    flip(path, position)
    reader, _ = drafted(copied.run)
    with pytest.raises(dcp.api.CheckpointException) as refusal:
        dcp.load({f"model.module.{name}": torch.empty(32)}, storage_reader=reader)
    assert isinstance(refusal.value.failures[0][0], ProofError)


def assessed(name: str) -> LoadAssessment:
    """Return the assessment of a checkpoint for a job of Megatron-FSDP."""
    run = fixture_named(name).run
    arguments = Namespace(
        ckpt_step=None, non_persistent_ckpt_type=None, ckpt_format="fsdp_dtensor", use_megatron_fsdp=True
    )
    found = assess_fsdp(LoadSession(run), str(run), arguments, None)
    assert found is not None
    return found


def test_pipeline_stages_are_refused() -> None:
    """With the reason, before stock builds anything."""
    found = assessed("p10")
    assert not found.decision.is_stock
    arguments = Namespace(pipeline_model_parallel_size=2)
    with pytest.raises(ResumeRefusedError, match="layer numbers of Megatron-FSDP's pipeline stages"):
        load_into_fsdp({"get_args": lambda: arguments}, LoadSession(found.folder), lambda: pytest.fail("called"))


def test_its_own_format_is_left_to_stock() -> None:
    assert assessed("p50").decision.is_stock


@pytest.mark.parametrize(
    ("own", "says"), [("torch_dist", True), ("torch_dcp", False)], ids=["another format", "its own format"]
)
def test_jobs_of_torch_fsdp_get_a_hint(own: str, says: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(fsdp_load, "announce", said.append)
    arguments = Namespace(
        use_torch_fsdp2=True, ckpt_format=own, no_load_optim=False, finetune=False, ckpt_step=None,
        non_persistent_ckpt_type=None,
    )  # fmt: skip
    fsdp_load.advise_torch_fsdp(arguments, str(fixture_named("p10").run))
    assert [line.partition("; ")[2] for line in said] == [
        "with --ckpt-format torch_dcp this package resumes a checkpoint of any format"
    ] * says
