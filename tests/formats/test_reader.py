"""Test what readers of all formats have in common."""

from __future__ import annotations

from pathlib import Path

import torch

from mcore_ckpt_ext import open_checkpoint
from tests.harness.checkpoints import fixture_named


def test_the_folder_has_the_iteration_where_the_common_state_has_none(tmp_path: Path) -> None:
    copy = fixture_named("p05").copy_to(tmp_path / "copy")
    folder = copy.iteration.rename(copy.run / "iter_0000007")
    assert open_checkpoint(folder).job.iteration() == 4
    common = torch.load(folder / "common.pt", weights_only=False)
    del common["iteration"]
    (folder / "common.pt").chmod(0o644)
    torch.save(common, folder / "common.pt")
    assert open_checkpoint(folder).job.iteration() == 7
    assert open_checkpoint(folder.rename(tmp_path / "elsewhere")).job.iteration() == 0
