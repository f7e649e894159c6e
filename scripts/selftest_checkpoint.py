"""Creates the checkpoint of eight ranks that `mcore-ckpt selftest` resumes, with genuine Megatron on CPU ranks.

python scripts/selftest_checkpoint.py        in the environment of the tests
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tarfile
from pathlib import Path

from megatron_on_cpu import launch

from mcore_ckpt_ext.megatron import selftest
from mcore_ckpt_ext.selftest.jobs import Machine, Order
from mcore_ckpt_ext.selftest.plan import job_of_eight_ranks
from mcore_ckpt_ext.selftest.shipped import ARCHIVE
from mcore_ckpt_ext.selftest.state import State, assemble

# The name becomes part of the checkpoint, as an argument of the job.
FOLDER = Path("/tmp/selftest")
TIME_LIMIT = 200


def main() -> int:
    """Train, save, and pack."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    FOLDER.mkdir()
    try:
        job = job_of_eight_ranks(Machine(8, "gloo"))
        order = Order(FOLDER, (job,))
        program = Path(selftest.__file__).with_name("rank.py")
        result = launch.run(8, program, [str(order.write())], timeout=TIME_LIMIT)
        if result.returncode:
            sys.stderr.write(result.output)
            return 1
        whole = assemble(State.load(order.state(job.name)))
        shutil.rmtree(order.state(job.name))
        whole.save(order.state(job.name) / "rank_00000.pt")
        _pack(order, job.name)
    finally:
        shutil.rmtree(FOLDER)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size:,} bytes")
    return 0


def _pack(order: Order, name: str) -> None:
    """Make the archive from a finished job, without the sidecar, as if saved without this package."""
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for path in (order.checkpoints(name), order.state(name), order.results):
            archive.add(path, path.relative_to(order.folder), filter=_neutral)


def _neutral(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if Path(entry.name).name == "mcore_ckpt_ext.json":
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry


if __name__ == "__main__":
    raise SystemExit(main())
