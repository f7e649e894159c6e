"""Test the cooperation of a self-test's ranks under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mcore_ckpt_ext.cli.ranks import Place
from mcore_ckpt_ext.cli.selftest_ranks import require_shared_folder
from mcore_ckpt_ext.errors import UsageError


def test_several_nodes_need_a_folder(tmp_path: Path) -> None:
    require_shared_folder(Place(0, 8, 0, 8), None)
    require_shared_folder(Place(0, 8, 0, 4), tmp_path)
    with pytest.raises(UsageError, match="do not share a folder for temporary files"):
        require_shared_folder(Place(0, 8, 0, 4), None)


# A process of the self-test; its rank is a program that fails in the first round, where the other would wait for ever.
PROCESS = '''
import os, sys
from pathlib import Path
from mcore_ckpt_ext.cli.ranks import place_among_ranks
from mcore_ckpt_ext.cli.selftest_ranks import Team
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
