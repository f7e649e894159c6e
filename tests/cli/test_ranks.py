"""Test that processes of torchrun and srun find their places."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.cli.ranks import Place, first_node, place_among_ranks, variables_of_srun
from mcore_ckpt_ext.errors import UsageError

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "1012345",
}  # fmt: skip


def test_under_torchrun() -> None:
    assert place_among_ranks(TORCHRUN) == Place(5, 8, 1, 4)
    assert variables_of_srun(TORCHRUN) == {}


def test_under_srun() -> None:
    assert place_among_ranks(SRUN) == Place(5, 8, 1, 4)
    found = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu03", "MASTER_PORT": "22345"}
    assert variables_of_srun(SRUN) == found
    assert variables_of_srun({**SRUN, "MASTER_ADDR": "mine", "RANK": "1"}) == {
        "WORLD_SIZE": "8",
        "MASTER_PORT": "22345",
    }


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "8"},  # of a training pod's shell
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"},  # of salloc's
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # of a batch script
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_one_process_alone(variables: dict[str, str]) -> None:
    assert place_among_ranks(variables) is None
    assert variables_of_srun(variables) == {}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu03", "gpu03"), ("gpu[03-05,9],login", "gpu03"), ("a,b", "a"), ("rack2-node[1]", "rack2-node1")],
)
def test_the_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_no_node() -> None:
    with pytest.raises(UsageError, match="the first node of this job is unknown"):
        first_node("")
