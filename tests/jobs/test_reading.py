"""Test how much each rank of genuine Megatron-LM reads and holds during a resume: little more than its shards."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import assemble

from tests.harness.cases import Case, Outcomes, load_all, save_noise
from tests.harness.jobs import Job
from tests.harness.layouts import Layout

pytestmark = pytest.mark.nightly

MEBIBYTE = 1 << 20
# 76 million parameters: the whole optimizer, 0.9 GB, is far beyond a rank's shards and 256 MiB.
LARGE = ["--num-layers", "6", "--hidden-size", "1024", "--num-attention-heads", "8"]
STATE = 12  # bytes of a master and two moments


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reading")


@pytest.fixture(scope="module")
def large(folder: Path) -> Path:
    """Saved as TP1 x PP2."""
    return save_noise(folder / "saved", Layout(1, 2, 2), LARGE)


@pytest.fixture(scope="module")
def outcomes(folder: Path, large: Path) -> Outcomes:
    """Resumed as TP4 x PP1."""
    return load_all(folder / "job", Layout(4, 1, 4), [Case("large", large)], more=LARGE)


def test_a_rank_reads_its_own_shards_and_what_lies_in_the_same_pages(outcomes: Outcomes, large: Path) -> None:
    """Five twelfths of the parameters are cut in columns: short pieces, each a quarter of a row."""
    metadata = (large / "iter_0000004" / ".metadata").stat().st_size
    for rank in outcomes["large"]:
        optimizer = STATE * rank["elements"]
        assert rank["planned_bytes"] == optimizer
        own = optimizer + rank["fast"]
        assert rank["fast"] == 2 * rank["elements"]
        assert own < rank["read_bytes"] < (7 + 4 * 5) / 12 * own + metadata


def test_rows_that_become_zeros_are_not_read(gpt: Job, tmp_path: Path) -> None:
    """128 rows of 32 more than were saved, for each kind, over two tensor-parallel ranks: all on the second."""
    outcomes = load_all(tmp_path, Layout(2, 1, 2, vocabulary=256), [Case("padded", gpt.run)])
    first, second = outcomes["padded"]
    assert (first["filled_elements"], second["filled_elements"]) == (0, 3 * 128 * 32)
    for rank in (first, second):
        assert rank["planned_bytes"] == STATE * rank["elements"] - 4 * rank["filled_elements"]


@pytest.fixture(scope="module")
def replicas(gpt: Job, folder: Path) -> Outcomes:
    """One resume of which all ranks want all weights, as they do by default, and with `--ckpt-ext-read-once`."""
    cases = [Case("DP4", gpt.run), Case("once", gpt.run, {"ckpt_ext_read_once": True})]
    return load_all(folder / "replicas", Layout(1, 1, 4), cases)


def test_with_data_parallelism_a_rank_reads_its_part_of_the_shards(replicas: Outcomes, gpt: Job) -> None:
    ranks = replicas["DP4"]
    assert [rank["planned_bytes"] for rank in ranks] == [STATE * rank["elements"] for rank in ranks]
    parameters = sum(tensor.numel() for name, tensor in assemble(gpt.at_save).items() if name.startswith("fp32_param"))
    assert sum(rank["elements"] for rank in ranks) == parameters


def test_a_rank_holds_its_own_shards_and_at_most_256_mib_more(outcomes: Outcomes) -> None:
    """The masters are there already; two moments come, and nothing else that is large, at any moment."""
    everything = sum(STATE * rank["elements"] for rank in outcomes["large"])
    for rank in outcomes["large"]:
        moment = 4 * rank["elements"]
        assert everything > 3 * moment + 512 * MEBIBYTE
        grown = rank["memory"]
        assert grown["prepare"] < 256 * MEBIBYTE
        assert 0.9 * moment < grown["prove"] < moment + 256 * MEBIBYTE
        assert grown["prove"] + grown["fill"] < 2 * moment + 256 * MEBIBYTE


def test_replicated_data_is_read_once(replicas: Outcomes) -> None:
    by_all, once = (sorted(tuple(read) for rank in replicas[name] for read in rank["reads"]) for name in replicas)
    assert bytes_of(once) == distinct(once) == distinct(by_all)
    weights = sum(rank["fast"] for rank in replicas["once"]) // 4
    assert bytes_of(by_all) == distinct(by_all) + 3 * weights
    assert all(rank["reads"] for rank in replicas["once"])
    for rank, other in zip(replicas["once"], replicas["DP4"], strict=True):
        assert (rank["error"], rank["after"], rank["fast"]) == (None, other["after"], other["fast"])
        assert rank["after"] != rank["before"]


def test_under_another_layout_one_rank_reads_the_index_for_all(replicas: Outcomes) -> None:
    first, *others = (rank["index reads"] for rank in replicas["DP4"])
    assert first > 0
    assert others == [0, 0, 0]


def bytes_of(reads: list[tuple[str, int, int]]) -> int:
    return sum(stop - start for _, start, stop in reads)


def distinct(reads: list[tuple[str, int, int]]) -> int:
    """Bytes, each counted once; `reads` ascending."""
    total, reached = 0, ("", 0)
    for file, start, stop in reads:
        first = max(start, reached[1]) if file == reached[0] else start
        total += max(stop - first, 0)
        reached = file, max(stop, first)
    return total
