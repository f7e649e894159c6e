"""Test NeMo's `weights` by a checkpoint of Megatron with NeMo's keys and common state; genuine calls: `tests/jobs`."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.job.facts import Facts
from tests.harness.checkpoints import assert_is_the_truth, fixture_named

FACTS = Facts(tensor_model_parallel_size=1, pipeline_model_parallel_size=4)


@pytest.fixture(scope="module")
def nemo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemo")
    weights = folder / "weights"
    shutil.copytree(fixture_named("p05").iteration, weights)
    index = pickle.loads((weights / ".metadata").read_bytes())
    index.state_dict_metadata = {renamed(key): value for key, value in index.state_dict_metadata.items()}
    index.storage_data = {replace(key, fqn=renamed(key.fqn)): value for key, value in index.storage_data.items()}
    (weights / ".metadata").write_bytes(pickle.dumps(index))
    common = torch.load(weights / "common.pt", weights_only=False)
    lightning = {"global_step": 4, "loops": {"fit_loop": {}}, "callbacks": {}}
    torch.save({"optimizer": [common["optimizer"]], **lightning}, weights / "common.pt")
    return folder


def renamed(key: str) -> str:
    """`module.` comes before a name of the model, also in a key of the optimizer."""
    optimizer, dot, name = key.rpartition("optimizer.state.")
    kind, _, name = name.partition(".") if dot else ("", "", name)
    return f"{optimizer}{dot}{kind}{'.' if dot else ''}module.{name}"


def test_it_is_read_under_megatrons_names(nemo: Path) -> None:
    checkpoint = open_checkpoint(nemo, facts=FACTS)
    assert checkpoint.job.iteration() == 4
    assert_is_the_truth(checkpoint, fixture_named("p05"))


def test_state_of_lightning_is_left_out(nemo: Path) -> None:
    """Of it, only what has a value is worth a note."""
    (note,) = (
        note
        for note in open_checkpoint(nemo, facts=FACTS).format.notices(open_checkpoint(nemo, facts=FACTS))
        if "Lightning" in note
    )
    assert note.endswith(": loops")
