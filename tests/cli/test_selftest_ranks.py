"""Test a self-test under torchrun or srun: the numbers of the ranks, and their cooperation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mcore_ckpt_ext.cli.selftest_ranks import Place, first_node, place_among_ranks, require_shared_folder
from mcore_ckpt_ext.errors import UsageError

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "1012345",
}  # fmt: skip


def test_under_torchrun() -> None:
    assert place_among_ranks(TORCHRUN) == (Place(5, 8, 1, 4), {})


def test_under_srun() -> None:
    found = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu03", "MASTER_PORT": "22345"}
    assert place_among_ranks(SRUN) == (Place(5, 8, 1, 4), found)
    assert place_among_ranks({**SRUN, "MASTER_ADDR": "mine", "MASTER_PORT": "1"}) == (
        Place(5, 8, 1, 4), {"RANK": "5", "WORLD_SIZE": "8"},
    )  # fmt: skip


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "8"},  # of a training pod's shell
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"},  # of salloc's
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_one_process_alone(variables: dict[str, str]) -> None:
    assert place_among_ranks(variables) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu03", "gpu03"), ("gpu[03-05,9],login", "gpu03"), ("a,b", "a"), ("rack2-node[1]", "rack2-node1")],
)
def test_the_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_no_node() -> None:
    with pytest.raises(UsageError, match="the first node of this job is unknown"):
        first_node("")


def test_several_nodes_need_a_folder(tmp_path: Path) -> None:
    require_shared_folder(Place(0, 8, 0, 8), None)
    require_shared_folder(Place(0, 8, 0, 4), tmp_path)
    with pytest.raises(UsageError, match="do not share a folder for temporary files"):
        require_shared_folder(Place(0, 8, 0, 4), None)


# A process of the self-test; its rank is a program that fails in the first round, where the other would wait for ever.
PROCESS = '''
import os, sys
from pathlib import Path
from mcore_ckpt_ext.cli.selftest_ranks import Team, place_among_ranks
from mcore_ckpt_ext.selftest.jobs import Order

RANK = """
import os, sys, time
path = os.path.dirname(sys.argv[1])
here = os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], os.environ["MASTER_PORT"]
open(os.path.join(path, "ran"), "a").write(" ".join(here) + chr(10))
if path.endswith("first"):
    sys.exit(3) if os.environ["RANK"] == "1" else time.sleep(600)
"""
folder = Path(sys.argv[1])
place, _ = place_among_ranks(os.environ)
team = Team(place, 60, (sys.executable, "-c", RANK))

def test(start):
    for name in ("first", "second"):
        (folder / name).mkdir()
        print("ended:", start(Order(folder / name, ())), flush=True)
    return 7

code = team.lead(test) if place.rank == 0 else team.follow()
print("code", code, flush=True)
'''


@pytest.mark.thorough
def test_all_ranks_are_started_again_after_one_has_failed(tmp_path: Path) -> None:
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    command = ["--standalone", "--nproc-per-node", "2", str(script), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended:")]
    assert len(ended) == 2
    assert "rank 1 ended with exit code 3" in ended[0]
    assert ended[1] == "ended: "
    assert done.stdout.splitlines().count("code 7") == 2
    ran = {
        name: [line.split() for line in (tmp_path / name / "ran").read_text().splitlines()]
        for name in ("first", "second")
    }
    for ranks in ran.values():
        assert sorted(line[:3] for line in ranks) == [["0", "2", "0"], ["1", "2", "1"]]
        assert len({line[3] for line in ranks}) == 1
