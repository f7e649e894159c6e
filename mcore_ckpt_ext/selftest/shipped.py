"""The checkpoint of eight ranks in this package, with the live state at its save.

`scripts/selftest_checkpoint.py` made it with real Megatron.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from mcore_ckpt_ext.selftest.jobs import Order

ARCHIVE = Path(__file__).with_name("eight_ranks.tar.xz")


def unpack(order: Order) -> None:
    """Extract the checkpoint, the state and the result to the paths of a finished job."""
    with tarfile.open(ARCHIVE) as archive:
        # `extractall` has no `filter` before Python 3.11.4 and 3.10.12; Debian 12 has 3.11.2.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(order.folder)


def pack(order: Order, name: str) -> None:
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
