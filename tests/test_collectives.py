"""Test the messages between ranks: all ranks get the same, whether their items are equal or not."""

from __future__ import annotations

import gc
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt_ext.collectives import Failure, TorchRanks, agree, gather, highest_of_all, list_reasons_of_all
from mcore_ckpt_ext.errors import ResumeRefusedError, format_ranks

RANKS = 8
Told = tuple[dict[str, list[Any]], dict[str, list[Any]], list[int]]
# What each rank tells.
ITEMS: dict[str, list[Any]] = {
    "all the same": [("nothing", None)] * RANKS,
    "few": [["name"] * 1000 if rank == 3 else [] for rank in range(RANKS)],
    "all different and short": [(None, str(rank)) for rank in range(RANKS)],
    "short, and few others": [rank if rank % 4 else "long" * (100 + rank) for rank in range(RANKS)],
    "short, and many others": [rank if rank % 2 else "long" * (100 + rank) for rank in range(RANKS)],
    "as long as is short, and longer": ["x" * (length + 30) for length in range(RANKS)],
    "all different and much": [bytes([rank]) * (200_000 + rank) for rank in range(RANKS)],
    "all different": [{"rank": rank, "names": ["x"] * rank} for rank in range(RANKS)],
}


# Of the second, rank 0 is no member.
GROUPS = (0, 3, 4), (1, 2, 5, 6, 7)


def tell(rank: int, folder: Path, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    groups = [dist.new_group(list(members)) for members in GROUPS]
    own = groups[0 if rank in GROUPS[0] else 1]
    in_group = {name: gather(items[rank], own) for name, items in ITEMS.items()}
    highest = highest_of_all([rank, -rank], own)
    results.put((rank, {name: gather(items[rank]) for name, items in ITEMS.items()}, in_group, highest))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Told]:
    """What each rank has gathered from all ranks, and from those of its group, whose highest numbers follow."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [context.Process(target=tell, args=(rank, folder, results)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    found = {rank: tuple(rest) for rank, *rest in (results.get(timeout=60) for _ in ranks)}
    for process in ranks:
        process.join()
    return found


@pytest.mark.parametrize("name", ITEMS)
def test_every_rank_gathers_the_values_of_all(name: str, told: dict[int, Told]) -> None:
    assert [told[rank][0][name] for rank in range(RANKS)] == [ITEMS[name]] * RANKS


@pytest.mark.parametrize("members", GROUPS)
def test_the_ranks_of_a_group_communicate_among_themselves(members: tuple[int, ...], told: dict[int, Told]) -> None:
    expected = {name: [items[rank] for rank in members] for name, items in ITEMS.items()}
    for rank in members:
        _, gathered, highest = told[rank]
        assert gathered == expected
        assert highest == [max(members), -min(members)]


def test_ranks_with_the_same_reason_are_joined() -> None:
    reasons = ["out of memory"] * 512 + ["no such file", "no such file"] + ["out of memory"] * 510
    assert list_reasons_of_all(reasons) == "rank 0 to 511, 514 to 1023: out of memory\n  rank 512, 513: no such file"
    assert format_ranks(range(0, 1024, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 504 more"


class WithAnother(TorchRanks):
    """This rank, and another one that has learned of its failure."""

    def items_by_rank(self, item: Any) -> dict[int, Any]:
        return {0: item, 1: (None, "")}


def test_of_a_failure_that_megatron_collects_only_the_failed_rank_is_reported() -> None:
    """On most ranks its exception says nothing."""
    failures: Any = {0: (RuntimeError("a damaged object"), [])}

    def work() -> None:
        raise Failure("", failures)

    with pytest.raises(ResumeRefusedError, match="refused while reading; untouched") as refused:
        WithAnother().agree(work, "reading", "untouched")
    assert "rank 0: rank 0: a damaged object" in str(refused.value)
    assert "rank 1" not in str(refused.value)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_while_ranks_work_and_goes_on_as_before(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert agree("working", gc.isenabled) == [False]
        assert gc.isenabled() == enabled
        with pytest.raises(ResumeRefusedError, match="ZeroDivisionError"):
            agree("working", lambda: 1 // 0)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
