"""Test that Booster's files are complete or absent, that errors reach all ranks, and that stock files are read."""

from __future__ import annotations

import json
import re
import resource
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from colossalai_on_cpu import ranks

from mcore_ckpt_ext import zero_strict_state_dict as strict
from mcore_ckpt_ext.colossalai import gathering, state, tensor_parallel
from mcore_ckpt_ext.colossalai.reading import load
from tests.colossalai.boosted import boost, train
from tests.colossalai.jobs import refusal, same_bits, wrap
from tests.colossalai.models import Everything


def test_a_disk_that_refuses_on_rank_0_stops_all_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    saves = {
        "sharded model": lambda b, m, o: b.save_model(m, str(tmp_path / "model"), shard=True, size_per_shard=0.02),
        "model": lambda b, m, o: b.save_model(m, str(tmp_path / "model.bin")),
        "safetensors": lambda b, m, o: b.save_model(m, str(tmp_path / "m.safetensors"), use_safetensors=True),
        "sharded optimizer": lambda b, m, o: b.save_optimizer(o, str(tmp_path / "optim"), True, size_per_shard=0.02),
        "optimizer": lambda b, m, o: b.save_optimizer(o, str(tmp_path / "optim.bin")),
    }

    def job() -> None:
        strict.install()
        booster, model, optimizer = boost()
        train(booster, model, optimizer, range(1))
        for save in saves.values():
            save(booster, model, optimizer)
        dist.barrier()
        before = _contents(tmp_path)
        train(booster, model, optimizer, range(1, 2))
        for name, save in saves.items():
            if dist.get_rank() == 0:
                # No file may grow beyond this; what is above it fails while it is written.
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            text = refusal(lambda save=save: save(booster, model, optimizer))
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert "rank 0: " in text, (name, text)
            dist.barrier()
            assert _contents(tmp_path) == before, name
            dist.barrier()
        booster.load_model(model, str(tmp_path / "model"), strict=True)

    ranks.run(2, job)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_running_out_of_memory_on_one_rank_stops_all(tmp_path: Path) -> None:
    def job() -> None:
        from colossalai.utils import safetensors

        strict.install()
        model, _ = wrap(Everything)
        calls = {
            "state_dict": lambda: model.state_dict(),
            "shards": lambda: list(model.state_dict_shard(max_shard_size=0.005)),
            "static": lambda: strict.get_static_torch_model(model),
        }
        expected = model.state_dict()
        for name, call in calls.items():
            with _failing_on_first_rank(gathering, "_room", after=2):
                assert "MemoryError" in refusal(call), name
        # The copies of what lies in no chunk, not the room to gather in.
        with _failing_on_first_rank(state, "own_copy", after=1):
            assert "MemoryError" in refusal(lambda: model.state_dict())
        again = model.state_dict()
        assert list(again) == list(expected)
        assert all(torch.equal(again[name], value) for name, value in expected.items() if "_extra" not in name)
        # What a consumer of shards fails at.
        shards = model.state_dict_shard(max_shard_size=0.005)
        next(shards)
        if dist.get_rank() == 0:
            assert "my disk" in refusal(lambda: shards.throw(OSError("my disk")))
        else:
            assert "rank 0: OSError: my disk" in refusal(lambda: list(shards))
        # What ColossalAI's asynchronous writer fails at, in a loop over the shards.
        booster, model, optimizer = boost()
        train(booster, model, optimizer, range(1))
        saves = {
            "model": lambda path: booster.save_model(model, path, shard=True, size_per_shard=0.02, use_async=True),
            "optimizer": lambda path: booster.save_optimizer(
                optimizer, path, True, size_per_shard=0.02, use_async=True
            ),
        }
        for name, save in saves.items():
            call = partial(save, str(tmp_path / name))
            with _failing_on_first_rank(safetensors, "save", after=0):
                if dist.get_rank() == 0:
                    with pytest.raises(MemoryError, match="no room"):
                        call()
                else:
                    assert "rank 0: MemoryError: no room" in refusal(call), name
        # Nor does ColossalAI's own gathering of tensor-parallel slices run out of it on one rank alone.
        booster, model, optimizer = boost(tensor_parallel=2)
        train(booster, model, optimizer, range(1))
        calls = {"state_dict": lambda: model.state_dict(), "optimizer": lambda: optimizer.state_dict()}
        for name, call in calls.items():
            with _failing_on_first_rank(tensor_parallel, "room_for", after=2):
                assert "MemoryError" in refusal(call), name
            assert bool(call())
        for dtype in (torch.int8, torch.bool):
            assert "invalid dtype for parameters" in refusal(lambda dtype=dtype: model.state_dict(dtype=dtype))

    ranks.run(2, job, timeout=60)


@contextmanager
def _failing_on_first_rank(module: Any, name: str, after: int) -> Iterator[None]:
    """Let a function of a module run out of memory on rank 0 from a call on."""
    original, calls = getattr(module, name), count()

    def function(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) >= after:
            raise MemoryError("no room")
        return original(*arguments, **keywords)

    if dist.get_rank() == 0:
        setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


def test_numpy_scalars_and_legacy_archives_are_read(tmp_path: Path) -> None:
    def job() -> None:
        booster, model, optimizer = boost()
        train(booster, model, optimizer, range(1))
        optimizer.optim.param_groups[0]["lr"] = np.float64(0.125)
        # ColossalAI's own files: what torch's safe unpickler does not know is in them, too.
        booster.save_optimizer(optimizer, str(tmp_path / "stock"), shard=True)
        strict.install()
        booster.save_optimizer(optimizer, str(tmp_path / "ours"), shard=True)
        booster.save_optimizer(optimizer, str(tmp_path / "ours.bin"))
        state = model.state_dict()
        if state:
            torch.save(state, tmp_path / "legacy.bin", _use_new_zipfile_serialization=False)
            groups = torch.load(tmp_path / "ours" / "pytorch_optim_group.bin", weights_only=True)
            assert type(groups[0]["lr"]) is float
        dist.barrier()
        booster.load_model(model, str(tmp_path / "legacy.bin"), strict=True)
        assert same_bits(model.state_dict(), state)
        for name in ("stock", "ours", "ours.bin"):
            optimizer.optim.param_groups[0]["lr"] = 1.0
            booster.load_optimizer(optimizer, str(tmp_path / name))
            assert optimizer.optim.param_groups[0]["lr"] == 0.125, name

    ranks.run(2, job)


def accepted_by_name() -> dict[str, Any]:
    """Find what a program lets torch load as torch 2.4 and 2.5 do: by its own name, which no tuple has."""
    return {f"{one.__module__}.{one.__name__}": one for one in torch.serialization.get_safe_globals()}


@pytest.mark.parametrize("release", ["installed", "2.5"])
@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_numpy_scalars_are_read_by_each_release_of_torch(
    module: str, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if release == "2.5":
        monkeypatch.setattr(torch._weights_only_unpickler, "_get_user_allowed_globals", accepted_by_name)
        monkeypatch.delattr(torch.serialization, "safe_globals", raising=False)
    before = set(torch.serialization.get_safe_globals())
    file = tmp_path / "groups.bin"
    torch.save([{"lr": np.float64(0.125), "weight": torch.ones(2)}], file)
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in records.items():
            written = re.sub(rb"numpy\._?core\.multiarray", module.encode(), content)
            archive.writestr(name, written if name.endswith("data.pkl") else content)
    (group,) = load(file)
    assert group["lr"] == 0.125
    assert torch.equal(group["weight"], torch.ones(2))
    assert set(torch.serialization.get_safe_globals()) == before


def test_files_of_two_saves_are_not_one_checkpoint(tmp_path: Path) -> None:
    def job() -> None:
        strict.install()
        booster, model, _ = boost()
        booster.save_model(model, str(tmp_path / "small"), shard=True, size_per_shard=0.02)
        booster.save_model(model, str(tmp_path / "large"), shard=True, size_per_shard=0.04)
        dist.barrier()
        if dist.get_rank() == 0:
            index = json.loads((tmp_path / "small" / "pytorch_model.bin.index.json").read_text())
            assert len(set(index["weight_map"].values())) > 2
            name = "pytorch_model-00002.bin"
            shutil.copy(tmp_path / "large" / name, tmp_path / "small" / name)
        dist.barrier()
        text = refusal(lambda: booster.load_model(model, str(tmp_path / "small"), strict=False))
        assert "other entries than its index lists" in text
        assert "pytorch_model-00002.bin" in text

    ranks.run(2, job)
