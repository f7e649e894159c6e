"""Test the random states of a sharded state dict, with Megatron's own classes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject

from mcore_ckpt_ext.errors import ResumeRefusedError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.megatron import load_session
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.random_states import grids_in, lacks_requested_states, with_live_random_states
from tests.harness.checkpoints import fixture_named
from tests.harness.replacing import replaced


def test_random_states_are_found_in_a_tree() -> None:
    states = ShardedObject("rng_state", ["live"], (2, 1, 2), (0, 0, 1))
    extra = ShardedObject("decoder.layers.0._extra_state", None, (1,), (0,))
    assert list(grids_in({"model": extra, "trainer": [{"rng_state": states}]})) == [(2, 1, 2)]
    assert list(grids_in({"model": extra})) == []


def test_live_random_states_replace_requested_ones() -> None:
    """The tree that was given, and all else in it, stay as they are."""
    states = ShardedObject("rng_state", ["live"], (2, 1), (0, 0))
    tree = {"model": {"weight": object()}, "trainer": [{"rng_state": states}, "other"]}
    found = with_live_random_states(tree)
    kept = found["trainer"][0]["rng_state"]
    assert isinstance(kept, LocalNonpersistentObject)
    assert kept.unwrap() == ["live"]
    assert found["model"] is tree["model"]
    assert tree["trainer"][0] == {"rng_state": states}


def rank_process(rank: int, store: Path, answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    opened = []

    def open_here(folder: Path, **options: Any) -> Any:
        opened.append(folder.name)
        if folder.name == "denied":
            raise PermissionError("permission denied")
        return open_checkpoint(folder, **options)

    run, found = fixture_named("p49").run, []
    for folder, grid in ((run, (2, 2)), (run, (1, 4)), (run, None), (run.with_name("denied"), (2, 2))):
        request = {"rng_state": ShardedObject("rng_state", ["live"], grid, (0, 0))} if grid and rank == 1 else {}
        try:
            with replaced(load_session, open_checkpoint=open_here):
                found.append(str(lacks_requested_states(LoadSession(folder), request)))
        except ResumeRefusedError as error:
            found.append(str(error))
    answers.put((rank, opened, found))
    dist.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.thorough
def test_rank_0_alone_reads_the_index(tmp_path: Path) -> None:
    """Also if only another rank requests random states; an error of rank 0 is one of every rank."""
    # A forked process may wait forever for a lock that a thread held at the fork, as seen with torch 2.7.
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=rank_process, args=(rank, tmp_path / "store", answers)) for rank in range(2)]
    for process in processes:
        process.start()
    (_, opened, found), (_, opened_by_another, found_by_another) = sorted(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    assert (len(opened), opened_by_another) == (3, [])
    assert found == found_by_another
    assert found[:3] == ["False", "True", "False"]
    assert "rank 0: PermissionError: permission denied" in found[3]
