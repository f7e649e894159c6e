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
