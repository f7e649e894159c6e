"""How the data loaders of Megatron-Bridge and ms-swift read on under another layout.

Bridge records its loader in `run_config.yaml`, and ms-swift stores all its arguments. Both have copies of Megatron's
samplers, which count from the samples that were consumed, and which this package does not change.

Sources: `build_pretraining_data_loader`, megatron/bridge/data/samplers.py, Megatron-Bridge 0.6.2;
`_prepare_dataloader`, swift/megatron/trainers/base.py, and swift/megatron/trainers/batch_sampler.py, ms-swift 4.6.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from mcore_ckpt_ext.continuity.cyclic import CYCLIC, ReadingLayout
from mcore_ckpt_ext.continuity.order_change import CHANGES, NEEDS_DATA_SAMPLES, UNKNOWN, OrderChange
from mcore_ckpt_ext.continuity.read_counts import has_same_epochs
from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.job.job_arguments import PARTIAL, JobArguments
from mcore_ckpt_ext.job.loops import swift

BRIDGE: Final = "Megatron-Bridge"
SWIFT: Final = "ms-swift"
_BRIDGE_SAMPLERS = "megatron/bridge/data/samplers.py, `build_pretraining_data_loader`"
_SWIFT_SAMPLER = "swift/megatron/trainers/batch_sampler.py, `MegatronPretrainingRandomSampler`"
_SHARDED = "each rank reads a part of the data set of its own, so that samples are read again or never"
_NOT_RECORDED = "the order is the same only if an epoch has as many samples under both, which is not recorded"
_RECORDED_BY_SWIFT = ("train_dataloader_shuffle", "data_sharding", "streaming")


def loop_of(job: JobArguments) -> str:
    """Return the loop that says how it reads its data; empty for Megatron-LM and others."""
    if job.is_complete or job.is_set(PARTIAL):
        return ""
    if job.is_set(swift.MARK):
        return SWIFT if all(map(job.is_set, _RECORDED_BY_SWIFT)) else ""
    return BRIDGE if job.dataloader_type else ""


def loader_in_words(job: JobArguments) -> str:
    """Return the loader of a job of such a loop, in the words of its loop."""
    if loop_of(job) == BRIDGE:
        return f"{job.dataloader_type} of {BRIDGE}"
    kinds = {"streaming": "stream", "group_by_length": "grouped by length", "train_dataloader_shuffle": "shuffled"}
    return f"{next((word for name, word in kinds.items() if job.raw.get(name)), 'in order')} of {SWIFT}"


def changes_by_layout(
    written: JobArguments, running: JobArguments, samples: int | None = None
) -> Iterator[OrderChange]:
    """Yield why a loop reads in another order under another layout.

    Args:
        written: the arguments of the job that saved the checkpoint.
        running: the same under another layout.
        samples: the samples of the data set; None if that is unknown.
    """
    before = ReadingLayout.of(written)
    now = ReadingLayout.of(running)
    if not loop_of(written) or loop_of(written) != loop_of(running) or before is None or now is None:
        yield OrderChange("the checkpoint", "it does not describe how its job read the data", verdict=UNKNOWN)
    elif loop_of(written) == SWIFT:
        yield from _swift_changes(written, before, now, samples)
    else:
        yield from _bridge_changes(written, running, before, now, samples)


def _bridge_changes(
    written: JobArguments, running: JobArguments, before: ReadingLayout, now: ReadingLayout, samples: int | None
) -> Iterator[OrderChange]:
    """Yield the changes of a Bridge loader; two deal out whole global batches."""
    loader = written.dataloader_type
    if loader == CYCLIC:
        yield from _random_sampler_changes(written, before, now, samples, _BRIDGE_SAMPLERS)
    elif loader == "batch":
        if written.global_batch_size != running.global_batch_size:
            yield OrderChange(
                f"--global-batch-size was {written.global_batch_size}, is {running.global_batch_size}",
                "an epoch then has another length, so that later ones begin at other samples",
                _BRIDGE_SAMPLERS,
                f"--global-batch-size {written.global_batch_size}",
                UNKNOWN,
            )
    elif loader != "single":
        yield OrderChange(
            f"the loader {loader_in_words(written)}", "its order is not recorded", _BRIDGE_SAMPLERS, verdict=UNKNOWN
        )


def _swift_changes(
    written: JobArguments, before: ReadingLayout, now: ReadingLayout, samples: int | None
) -> Iterator[OrderChange]:
    """Yield the changes of ms-swift's loader: the random sampler, but for streams."""
    if written.raw.get("streaming"):
        yield OrderChange(
            f"the loader {loader_in_words(written)}", "a stream has no position in a checkpoint", verdict=UNKNOWN
        )
        return
    is_grouped = bool(written.raw.get("group_by_length"))
    if is_grouped and before.step != now.step:
        yield OrderChange(
            _layouts_in_words(written, before, now),
            "samples of similar length are grouped by what all ranks read at once",
            _SWIFT_SAMPLER,
            f"keep {before}",
        )
        return
    is_sharded = bool(written.data_sharding and written.raw.get("train_dataloader_shuffle") and not is_grouped)
    before, now = (replace(layout, is_sharded=is_sharded) for layout in (before, now))
    yield from _random_sampler_changes(written, before, now, samples, _SWIFT_SAMPLER)


def _random_sampler_changes(
    written: JobArguments, before: ReadingLayout, now: ReadingLayout, samples: int | None, source: str
) -> Iterator[OrderChange]:
    """Yield the change of a sampler that derives an epoch from the layout."""
    if (before.data_parallel, before.micro_batch) == (now.data_parallel, now.micro_batch):
        return
    if before.is_sharded and before.data_parallel != now.data_parallel:
        why = _SHARDED
    elif samples is None:
        why = _NOT_RECORDED
    elif has_same_epochs(samples, before, now):
        return
    else:
        why = f"an epoch of {quantity(samples, 'sample')} is another one"
    verdict = UNKNOWN if why == _NOT_RECORDED else CHANGES
    uncounted = NEEDS_DATA_SAMPLES if loop_of(written) == BRIDGE else "the seed of the loader is not recorded"
    yield OrderChange(_layouts_in_words(written, before, now), why, source, f"keep {before}", verdict, uncounted)


def _layouts_in_words(written: JobArguments, before: ReadingLayout, now: ReadingLayout) -> str:
    return f"the loader {loader_in_words(written)} by {before}, now {now}"
