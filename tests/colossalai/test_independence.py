"""Test that ColossalAI's users load none of the code for Megatron, conversions and rehearsals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# The modules of ColossalAI's part, and what it takes from the rest with everything that this imports in turn.
PARTS = {"colossalai", "zero_strict_state_dict"}
SHARED = {
    *("collectives", "communicator", "devices", "errors", "group_device", "lazy_torch", "settings"),
    *("patching", "patching.import_hook", "patching.log", "patching.patch_point", "patching.registry"),
    "patching.singletons",
    *("storage", "storage.atomic_files", "storage.crc32", "storage.gc_pause", "storage.paths"),
    *("storage.multipart", "storage.store_errors", "storage.store_file", "storage.store_listing", "storage.store_path"),
}
# `import torch` installs the patches of Megatron by an entry point, which wait for Megatron's modules.
OF_AUTOLOAD = {"megatron", "megatron.installation", "megatron.patch_points"}
USE = """
import json, sys
import torch
from colossalai_on_cpu import ranks, redirect
redirect.install()
from mcore_ckpt_ext import zero_strict_state_dict as strict
from tests.colossalai.jobs import train, wrap

def use():
    strict.install(plugins=("gemini", "low_level_zero", "hybrid_parallel"))
    model, optimizer = wrap()
    train(model, optimizer, range(1))
    model.load_state_dict(strict.zero_strict_state_dict(model, only_rank_0=False))
    optimizer.load_state_dict(optimizer.state_dict())
    strict.get_static_torch_model(model)
    strict.status()
    strict.uninstall()
    return [name for name in sys.modules if name.startswith("mcore_ckpt_ext.")]

print(json.dumps(ranks.run(1, use)[0]))
"""


@pytest.mark.thorough
def test_using_the_state_dict_loads_nothing_for_megatron() -> None:
    path = f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'scripts'}"
    jobs = {
        autoload: subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", USE], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload, "PYTHONPATH": path}, text=True,
        )
        for autoload in ("0", "1")
    }  # fmt: skip
    for autoload, job in jobs.items():
        output, errors = job.communicate(timeout=300)
        assert job.returncode == 0, errors
        loaded = {name.partition(".")[2] for name in json.loads(output.splitlines()[-1])}
        assert loaded - SHARED - (OF_AUTOLOAD if autoload == "1" else set()) == {
            name for name in loaded if name.partition(".")[0] in PARTS
        }
        assert "colossalai.state" in loaded
