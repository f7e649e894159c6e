"""Test the cooperation of a self-test's ranks under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_ckpt_ext.cli.ranks import Place
from mcore_ckpt_ext.cli.selftest_ranks import require_shared_folder
from mcore_ckpt_ext.errors import UsageError
from tests.harness.joined import free_port


def test_several_nodes_need_a_folder(tmp_path: Path) -> None:
    require_shared_folder(Place(0, 8, 0, 8), None)
    require_shared_folder(Place(0, 8, 0, 4), tmp_path)
    with pytest.raises(UsageError, match="do not share a folder for temporary files"):
        require_shared_folder(Place(0, 8, 0, 4), None)


# A process of the self-test; its rank is a program that fails in the first round, where the other would wait for ever.
PROCESS = '''
import os, sys
from pathlib import Path
from mcore_ckpt_ext.cli.processes import connect
from mcore_ckpt_ext.cli.ranks import place_among_ranks, variables_of_srun
from mcore_ckpt_ext.cli.selftest_ranks import SelftestRanks
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
place = place_among_ranks(os.environ)

def test(start):
    for name in ("first", "second"):
        (folder / name).mkdir()
        print("ended:", start(Order(folder / name, ())), flush=True)
    return 7

os.environ.update(variables_of_srun(os.environ))
with connect(place.rank, place.total) as processes:
    team = SelftestRanks(place, processes, 60, (sys.executable, "-c", RANK))
    code = team.lead(test) if place.rank == 0 else team.follow()
sys.stdout.flush()
os._exit(code)  # as the command ends
'''


@pytest.mark.thorough
def test_all_ranks_are_started_again_after_one_has_failed(tmp_path: Path) -> None:
    """As under srun, where the first process holds the store and has to end last."""
    count, script = 3, tmp_path / "process.py"
    script.write_text(PROCESS)
    step = {"SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "127.0.0.1"}
    environment = {**os.environ, **step, "SLURM_JOB_ID": "1", "MASTER_PORT": free_port()}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**environment, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(count)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [7] * count, outputs
    first, second = (line for line in outputs[0][0].splitlines() if line.startswith("ended:"))
    assert "rank 1 ended with exit code 3" in first
    assert second == "ended: "
    ran = {
        name: [line.split() for line in (tmp_path / name / "ran").read_text().splitlines()]
        for name in ("first", "second")
    }
    for ranks in ran.values():
        assert sorted(line[:3] for line in ranks) == [[str(rank), str(count), str(rank)] for rank in range(count)]
        assert len({line[3] for line in ranks}) == 1
