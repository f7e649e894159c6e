"""Test what is said of the loaders of Megatron-Bridge and ms-swift, and compare it with their genuine samplers."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mcore_ckpt_ext.continuity.data_order import data_description, data_order, order_in_another_loop
from mcore_ckpt_ext.continuity.order_change import CHANGES, SAME_ORDER, UNKNOWN
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.description import megatron_arguments
from mcore_ckpt_ext.job.job_arguments import PARTIAL, JobArguments
from mcore_ckpt_ext.operations.layout_plan import plan
from tests.harness.checkpoints import fixture_named
from tests.harness.packages import installed_beside

_SAMPLES, _BATCH, _CONSUMED = 203, 16, 64
_SIZES = {"data_parallel_size": 4, "micro_batch_size": 1, "global_batch_size": _BATCH, "consumed_train_samples": 64}
_BRIDGE = {**_SIZES, "data_sharding": True, "train_iters": 10}
_SWIFT = {
    **_SIZES, "mcore_model": None, "train_dataloader_shuffle": True, "data_sharding": False, "streaming": False,
    "group_by_length": False, "train_iters": 10,
}  # fmt: skip
_DP2, _MICRO, _BOTH = (
    {"data_parallel_size": 2},
    {"micro_batch_size": 2},
    {"data_parallel_size": 2, "micro_batch_size": 2},
)
_LAYOUTS: list[dict[str, Any]] = [{}, _DP2, _MICRO, _BOTH]
_VERDICTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({**_BRIDGE, "dataloader_type": "single"}, (SAME_ORDER,) * 4),
    ({**_BRIDGE, "dataloader_type": "batch"}, (SAME_ORDER,) * 4),
    ({**_BRIDGE, "dataloader_type": "cyclic"}, (SAME_ORDER, CHANGES, UNKNOWN, CHANGES)),
    ({**_BRIDGE, "dataloader_type": "cyclic", "data_sharding": False}, (SAME_ORDER, UNKNOWN, UNKNOWN, UNKNOWN)),
    (_SWIFT, (SAME_ORDER, UNKNOWN, UNKNOWN, UNKNOWN)),
    ({**_SWIFT, "data_sharding": True}, (SAME_ORDER, CHANGES, UNKNOWN, CHANGES)),
    ({**_SWIFT, "train_dataloader_shuffle": False, "data_sharding": True}, (SAME_ORDER, UNKNOWN, UNKNOWN, UNKNOWN)),
    ({**_SWIFT, "group_by_length": True, "data_sharding": True}, (SAME_ORDER, CHANGES, CHANGES, UNKNOWN)),
]


def _job(values: dict[str, Any]) -> JobArguments:
    """Return arguments as they are read from a checkpoint of one of the loops."""
    if "mcore_model" in values:
        return megatron_arguments(values, Path("checkpoint"), None)
    return JobArguments.of(values, is_complete=False)


def _module(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def samplers() -> Iterator[Callable[..., Any]]:
    """Build the sampler of a rank as its loop does."""
    bridge = installed_beside("megatron-bridge", "0.6.2", "--only-binary=:all:")
    swift = installed_beside("ms-swift", "4.6.0", "--only-binary=:all:")
    logger = ModuleType("swift.utils")
    vars(logger).update(get_logger=logging.getLogger)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "swift", ModuleType("swift"))
        patch.setitem(sys.modules, "swift.utils", logger)
        of_bridge = _module(bridge / "megatron" / "bridge" / "data" / "samplers.py")
        of_swift = _module(swift / "swift" / "megatron" / "trainers" / "batch_sampler.py")

    def build(job: JobArguments, rank: int) -> Any:
        raw = job.raw
        size, micro, data = raw["data_parallel_size"], raw["micro_batch_size"], {"lengths": list(range(_SAMPLES))}
        if "mcore_model" in raw:
            return of_swift.MegatronPretrainingRandomSampler(
                data, _SAMPLES, _CONSUMED, micro, rank, size, data_sharding=raw["data_sharding"],
                shuffle=raw["train_dataloader_shuffle"], group_by_length=raw["group_by_length"], seed=42,
            )  # fmt: skip
        return of_bridge.build_pretraining_data_loader(
            data["lengths"], _CONSUMED, raw["dataloader_type"], micro, 0, raw["data_sharding"], pin_memory=False,
            data_parallel_rank=rank, data_parallel_size=size, global_batch_size=_BATCH, seed=1234,
        ).batch_sampler  # fmt: skip

    yield build


def _global_batches(build: Callable[..., Any], job: JobArguments) -> list[list[int]]:
    """Return the global batches of the rest of the epoch, and of the next one."""
    ranks: list[list[int]] = []
    for rank in range(job.raw["data_parallel_size"]):
        sampler = build(job, rank)
        epochs = 1 if job.dataloader_type == "single" else 2
        ranks.append([sample for _ in range(epochs) for batch in sampler for sample in batch])
    each = _BATCH // len(ranks)
    starts = range(0, len(ranks[0]) - each + 1, each)
    return [sorted(sample for read in ranks for sample in read[start : start + each]) for start in starts]


@pytest.mark.parametrize(("values", "verdicts"), _VERDICTS)
def test_what_the_checkpoint_says_is_what_the_samplers_do(
    samplers: Callable[..., Any], values: dict[str, Any], verdicts: tuple[str, ...]
) -> None:
    written = _job(values)
    before = _global_batches(samplers, written)
    for layout, verdict in zip(_LAYOUTS, verdicts, strict=True):
        running = written.replace(**layout)
        assert data_order(written, running).verdict == verdict, layout
        after = _global_batches(samplers, running)
        count = min(len(before), len(after))
        assert (verdict == SAME_ORDER) <= (before[:count] == after[:count]), layout
        assert (verdict == CHANGES) <= (before[:count] != after[:count]), layout


@pytest.mark.parametrize("values", [values for values, verdicts in _VERDICTS if UNKNOWN in verdicts[1:]])
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_with_the_size_of_the_data_set_the_order_is_known_and_what_is_read_again_is_counted(
    samplers: Callable[..., Any], values: dict[str, Any], layout: dict[str, Any]
) -> None:
    written = _job(values)
    running = written.replace(**layout)
    order = data_order(written, running, _SAMPLES)
    before, after = (_global_batches(samplers, job) for job in (written, running))
    count = min(len(before), len(after))
    assert (order.verdict == SAME_ORDER) is (before[:count] == after[:count]) or values.get("group_by_length")
    if "mcore_model" in values and order.verdict != SAME_ORDER:
        assert (order.read_again, order.never_read, bool(order.uncounted)) == (None, None, True)
        return
    rest, changed = (_rest_of_epoch(samplers, job) for job in (written, running))
    assert order.never_read == len(rest - changed)
    if values["data_sharding"]:
        read = range(_SAMPLES // 4 * 4)  # the old epoch, of four ranks
        assert order.read_again == len(changed & {*read} - rest)


def _rest_of_epoch(build: Callable[..., Any], job: JobArguments) -> set[int]:
    ranks = [build(job, rank) for rank in range(job.raw["data_parallel_size"])]
    return {sample for step in zip(*ranks, strict=False) for batch in step for sample in batch}


@pytest.mark.parametrize("values", [
    {**_BRIDGE, "dataloader_type": "external"},
    {**_BRIDGE, "dataloader_type": None},
    {**_BRIDGE, "dataloader_type": "single", PARTIAL: True},
    {**_SWIFT, "streaming": True},
    {name: value for name, value in _SWIFT.items() if name != "streaming"},
    {**_SIZES},
])  # fmt: skip
def test_all_else_is_unknown(values: dict[str, Any]) -> None:
    order = data_order(_job(values), _job(values))
    assert (order.verdict, order.sample) == (UNKNOWN, 64)


def test_another_loop_is_unknown() -> None:
    written = _job({**_BRIDGE, "dataloader_type": "single"})
    assert data_order(written, JobArguments.of({**_BRIDGE, "dataloader_type": "single"})).verdict == UNKNOWN


def test_another_global_batch_size() -> None:
    for loader in ("batch", "single"):
        written = _job({**_BRIDGE, "dataloader_type": loader, "train_samples": 160})
        order = data_order(written, written.replace(global_batch_size=32))
        assert order.verdict == (UNKNOWN if loader == "batch" else SAME_ORDER)


def test_a_resume_says_that_the_layout_changes_the_order_or_that_it_is_unknown() -> None:
    cyclic = _job({**_BRIDGE, "dataloader_type": "cyclic"})
    changed = order_in_another_loop(cyclic, JobArguments.of(_DP2))
    assert changed.sentence == (
        "data: goes on at sample 64, another order (the loader cyclic of Megatron-Bridge by DP4 with micro batch 1, "
        "now DP2 with micro batch 1: each rank reads a part of the data set of its own, so that samples are read again "
        "or never); how many samples are read again or never is not known: no checkpoint has the size of the data set; "
        "with it, --data-samples of `mcore-ckpt plan` counts them"
    )
    assert changed.hint == "keep DP4 with micro batch 1"
    for written in (cyclic, _job({**_BRIDGE, "dataloader_type": "single"}), _job({})):
        assert order_in_another_loop(written, JobArguments.of({"data_parallel_size": 4})).verdict == UNKNOWN


def test_a_checkpoint_of_megatron_bridge(tmp_path: Path) -> None:
    """By its genuine `save_checkpoint`; its configuration names a loader, as recipes do."""
    run = tmp_path / "run"
    shutil.copytree(fixture_named("p49").run, run)
    (config,) = run.glob("iter_*/run_config.yaml")
    text = config.read_text()
    for loader, goes_on in (("null", None), ("single", True), ("cyclic", False)):
        config.write_text(text.replace("dataloader_type: null", f"dataloader_type: {loader}"))
        accounts = {layout.sizes["dp"]: layout.data for layout in plan(run, 4).layouts}
        assert accounts[1].verdict == (UNKNOWN if goes_on is None else SAME_ORDER if goes_on else CHANGES)
        assert accounts[2].verdict == (UNKNOWN if goes_on is None else SAME_ORDER)
        assert accounts[1].sample == 32
    counted = {layout.sizes["dp"]: layout.data for layout in plan(run, 4, data_samples=960).layouts}
    assert (counted[1].read_again, counted[1].never_read, counted[2].never_read) == (31, 31, 0)
    assert "31 samples will be read again, 31 never" in counted[1].sentence
    words = data_description(open_checkpoint(config.parent).job.arguments())
    assert (words["loader"], words["consumed"]) == ("cyclic of Megatron-Bridge", "32 samples")
