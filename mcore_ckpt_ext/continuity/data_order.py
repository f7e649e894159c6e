"""The order in which a resumed job reads its data, compared with that of the last job by a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.continuity.batch_sizes import global_batch_of, indivisible_sizes, sizes_to_come
from mcore_ckpt_ext.continuity.cyclic import CYCLIC, HISTORY, ReadingLayout, as_argument, history_of
from mcore_ckpt_ext.continuity.data_files import BLEND_ARGUMENTS, BLEND_FILES, values_or_contents
from mcore_ckpt_ext.continuity.data_set import (
    Blend,
    Tokens,
    changed_sizes,
    comparable,
    effect_of_size,
    is_same_blend,
    keeps_blend,
    may_have_weights,
    samples_built_for,
)
from mcore_ckpt_ext.continuity.energon import EXTERNAL, loader_changes, redistribution, saves_loader_states
from mcore_ckpt_ext.continuity.features import is_tuned
from mcore_ckpt_ext.continuity.order_change import (
    CHANGES,
    EACH_ONCE,
    NEEDS_DATA_SAMPLES,
    SAME_ORDER,
    UNKNOWN,
    DataOrder,
    OrderChange,
)
from mcore_ckpt_ext.continuity.other_loops import BRIDGE, SWIFT, changes_by_layout, loader_in_words, loop_of
from mcore_ckpt_ext.continuity.read_counts import MOST_SAMPLES, ReadCounts, count_reads
from mcore_ckpt_ext.errors import quantity, shorten
from mcore_ckpt_ext.job.job_arguments import JobArguments

_SINGLE = "single"
_SAMPLERS = "megatron/training/datasets/data_samplers.py, until 0.15 megatron/legacy/data/data_samplers.py"
_GPT = "megatron/core/datasets/gpt_dataset.py, `GPTDataset._build_document_sample_shuffle_indices`"
_BLEND = "megatron/core/datasets/blended_megatron_dataset_builder.py"
_MIXED = "the data sets are mixed otherwise"


@dataclass(frozen=True)
class Determinant:
    """Something that determines the order of the samples.

    Attributes:
        arguments: the arguments of Megatron that set it.
        what: what it is, for messages.
        effect: what another value does.
        source: where it was read, in core_v0.7.0 to 0.19.2 and the development head of August 2026 unless it says more.
        verdict: the verdict if it differs.
        loaders: the loaders for which it matters.
        applies: returns False for a job for which it does not matter.
    """

    arguments: tuple[str, ...]
    what: str
    effect: str
    source: str
    verdict: str = CHANGES
    loaders: tuple[str, ...] = (_SINGLE, CYCLIC)
    applies: Callable[[JobArguments], bool] = lambda job: True


DETERMINANTS = (
    Determinant(("dataloader_type",), "the loader", "another loader reads in another order", _SAMPLERS,
                loaders=(_SINGLE, CYCLIC, EXTERNAL)),
    Determinant(("seed",), "the seed", "the data set is shuffled otherwise", _GPT,
                applies=lambda job: not is_tuned(job)),
    Determinant(("seq_length",), "the length of a sample", "documents are cut otherwise, and a sample is another one",
                _GPT),
    Determinant(("split",), "the split", "training has other documents", _BLEND),
    Determinant(("mock_data", "sft", "fim_data"), "the kind of data set", "it is another data set",
                "pretrain_gpt.py, `train_valid_test_datasets_provider`"),
    Determinant(("data_path", "train_data_path"), "the blend", f"{_MIXED}, unless they only lie in another place",
                f"{_BLEND}; megatron/core/datasets/blended_dataset.py", UNKNOWN),
    Determinant((*BLEND_FILES, "per_dataset_sequences_path"), "the blend",
                "the file may mix the data sets otherwise", f"{_BLEND}; megatron/training/utils.py", UNKNOWN),
    Determinant(("mid_level_dataset_surplus",), "the surplus of data sets in a blend",
                "as for the number of samples", f"{_BLEND}; 0.16 and later", UNKNOWN,
                applies=may_have_weights),
    Determinant(("phase_transition_iterations",), "the phases", "the position is counted from another iteration",
                "megatron/training/training.py, `build_train_valid_test_data_loaders`; 0.16 and later"),
)  # fmt: skip
"""What determines the order of the samples besides the layout, the batch and the number of samples."""


def order_in_another_loop(written: JobArguments, running: JobArguments) -> DataOrder:
    """Return the account of a loop on Megatron Core whose data loader is not seen during a load.

    Only the layout of the running job is known. It counts as a change of order if it is one for the loader that the
    checkpoint records.

    Args:
        written: the arguments of the job that saved the checkpoint.
        running: those of the job that resumes it.
    """
    same_loader = written.replace(data_parallel_size=running.data_parallel_size)
    changes = tuple(change for change in changes_by_layout(written, same_loader) if change.verdict == CHANGES)
    unknown = OrderChange("the data loader", "the training loop has one of its own", verdict=UNKNOWN)
    verdict = CHANGES if changes else UNKNOWN
    reasons = changes or (unknown,)
    return DataOrder(
        verdict, _consumed_samples(written), reasons, uncounted=_why_uncounted(reasons), is_changed=bool(changes)
    )


def data_order(
    written: JobArguments,
    running: JobArguments,
    samples: int | None = None,
    tokens: Tokens = lambda path, share: None,
) -> DataOrder:
    """Return whether a job reads on in the order of the job that saved the checkpoint.

    Args:
        written: the arguments of the job that saved the checkpoint.
        running: the arguments of the job that resumes it.
        samples: the samples of the data set, which no checkpoint records; None if they are unknown.
        tokens: returns the tokens of a data set of the job.
    """
    changes = tuple(_changes(written, running, samples, tokens))
    verdicts = {change.verdict for change in changes}
    note = _note(written, running, samples) if written.is_complete and not verdicts else ""
    counts = _counts_of(changes, written, running, samples)
    is_recut = bool(note) and saves_loader_states(running)
    verdict = CHANGES if CHANGES in verdicts else UNKNOWN if verdicts else EACH_ONCE if is_recut else SAME_ORDER
    sample = _consumed_samples(written)
    layouts = ReadingLayout.of(written), ReadingLayout.of(running)
    is_moved = None not in layouts and len({layout.reads for layout in layouts if layout is not None}) > 1
    return DataOrder(
        verdict=verdict,
        sample=sample,
        changes=changes,
        note="; ".join(filter(None, [note, _note_of_ignored_ramp(written, running, sample or 0)])),
        read_again=counts.again if isinstance(counts, ReadCounts) else None,
        never_read=counts.never if isinstance(counts, ReadCounts) else None,
        uncounted=counts if isinstance(counts, str) else "",
        indivisible=tuple(indivisible_sizes(running, sample or 0)),
        is_changed=is_moved or any(change.hint for change in changes),
    )


def data_description(job: JobArguments) -> dict[str, str]:
    """Return how a job reads its data, in words; empty if its arguments do not say it."""
    is_of_megatron = job.is_complete and job.is_set("dataloader_type")
    if not (is_of_megatron or loop_of(job)):
        return {}
    loader = _loader(job)
    layout = ReadingLayout.of(job)
    built_for = samples_built_for(job)
    is_sharded = layout is not None and layout.is_sharded
    sharding = "" if loader != CYCLIC else ", each rank a part" if is_sharded else ", not sharded"
    words = {"loader": f"{loader}{sharding}" if is_of_megatron else loader_in_words(job)}
    if (consumed := _consumed_samples(job)) is not None:
        words["consumed"] = quantity(consumed, "sample")
    if built_for is not None and loader != EXTERNAL and loop_of(job) != SWIFT:
        words["built for"] = quantity(built_for, "sample")
    if layout is not None:
        words["read by"] = str(layout)
    return words


def _loader(job: JobArguments) -> str:
    """Return the loader of a job.

    Without the argument it is `single` (`validate_args`, megatron/training/arguments.py, core_v0.7.0 to 0.19.2).
    """
    return job.dataloader_type or _SINGLE


def _consumed_samples(written: JobArguments) -> int | None:
    """Return the consumed samples; Megatron multiplies for checkpoints that do not record them."""
    consumed = written.consumed_train_samples
    iteration = written.raw.get("iteration")
    if not consumed and isinstance(iteration, int) and written.global_batch_size:
        return iteration * written.global_batch_size
    return consumed


def _changes(
    written: JobArguments, running: JobArguments, samples: int | None, tokens: Tokens
) -> Iterator[OrderChange]:
    if not (written.is_complete and written.is_set("dataloader_type")):
        yield from changes_by_layout(written, running, samples)
        if loop_of(written) == BRIDGE:
            yield from _changes_of_samples_built_for(written, running, tokens)
        return
    loaders = {_loader(written), _loader(running)}
    for row in DETERMINANTS:
        if loaders & set(row.loaders) and row.applies(running):
            yield from _differences(row, written, running)
    if EXTERNAL in loaders:
        yield from _changes_of_external(written, running)
        return
    yield from _changes_of_sizes(written, running)
    yield from _changes_of_samples_built_for(written, running, tokens)
    if CYCLIC in loaders and running.phase_transition_iterations and len(history_of(written, running)) > 1:
        yield OrderChange(
            "--dataloader-type cyclic with --phase-transition-iterations",
            "the epoch in progress is cut otherwise under another layout", _SAMPLERS,
            f"keep {ReadingLayout.of(written)}",
            uncounted="Megatron counts the position from the last transition",
        )  # fmt: skip


def followed_history(written: JobArguments, running: JobArguments) -> tuple[ReadingLayout, ...]:
    """Return the layouts that have read the data, if the samplers of the job follow their order.

    With phases Megatron counts from the last transition, and a history of the whole run does not apply.
    """
    is_followed = _loader(running) == CYCLIC and not running.phase_transition_iterations
    return history_of(written, running) if is_followed else ()


def changed_history(written: JobArguments, converted: JobArguments) -> dict[str, Any]:
    """Return the argument with which a converted checkpoint says how its data were read.

    It is empty where the conversion does not change how a job reads.

    Args:
        written: the arguments of the source.
        converted: those of the result.
    """
    recorded = as_argument(followed_history(written, converted))
    return {} if recorded is None else {HISTORY: recorded}


def _why_uncounted(changes: Sequence[OrderChange]) -> str:
    return "; ".join(dict.fromkeys(change.uncounted for change in changes))


def _counts_of(
    changes: Sequence[OrderChange], written: JobArguments, running: JobArguments, samples: int | None
) -> ReadCounts | str:
    """Return what is read again or never because of changes, or why that is not known."""
    if not changes:
        return ReadCounts(0, 0)
    if samples is None or any(change.uncounted != NEEDS_DATA_SAMPLES for change in changes):
        return _why_uncounted(changes)
    return _counts_by_layout(written, running, samples)


def _counts_by_layout(written: JobArguments, running: JobArguments, samples: int) -> ReadCounts | str:
    """Return what a random sampler reads again or never under another layout, or why that is not known."""
    before = ReadingLayout.of(written)
    now = ReadingLayout.of(running)
    consumed = _consumed_samples(written)
    if before is None or now is None or consumed is None:
        return "the checkpoint does not record how far its job has read"
    if samples > MOST_SAMPLES:
        return f"data sets of more than {quantity(MOST_SAMPLES, 'sample')} are not counted"
    return count_reads(samples, consumed, before, now) or "the sampler stops at its first batch"


def _differences(row: Determinant, written: JobArguments, running: JobArguments) -> Iterator[OrderChange]:
    """Yield the arguments of a row that differ, and that both jobs have."""
    for name in row.arguments:
        if not (written.is_set(name) and running.is_set(name)):
            continue
        if name in BLEND_ARGUMENTS and keeps_blend(written, running):
            continue
        is_loader = name == "dataloader_type"
        values = (_loader(written), _loader(running)) if is_loader else values_or_contents(name, written, running)
        old, new = (comparable(name, value) for value in values)
        if old == new:
            continue
        flag = f"--{name.replace('_', '-')}"
        is_mixed = (name.endswith("data_path") or isinstance(old, Blend)) and not is_same_blend(old, new)
        was, is_now = map(_text, values)
        yield OrderChange(
            f"{flag} was {was}, is {is_now}", _MIXED if is_mixed else row.effect, row.source, f"{flag} {was}",
            CHANGES if is_mixed else row.verdict,
        )  # fmt: skip


def _changes_of_sizes(written: JobArguments, running: JobArguments) -> Iterator[OrderChange]:
    """Yield the data sets whose files have changed since the last job began."""
    for path, old, new in changed_sizes(written, running):
        difference = f"{path} has {quantity(new, 'byte')}, before {old:,}"
        effect = "its documents are others, and their order"
        yield OrderChange(difference, effect, hint="the files with which the job began")


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        value = " ".join(map(str, value))
    return shorten(str(value), 60) if value else "not set"


def _changes_of_samples_built_for(
    written: JobArguments, running: JobArguments, tokens: Tokens
) -> Iterator[OrderChange]:
    """Yield a change of the samples that a data set is built for, if its order may depend on it."""
    old = samples_built_for(written)
    new = samples_built_for(running)
    if old is None or new is None or old == new:
        return
    verdict, why = effect_of_size(running, old, new, tokens)
    if verdict != SAME_ORDER:
        yield OrderChange(
            f"the data set is built for {quantity(new, 'sample')}, before for {old:,}",
            why,
            f"{_GPT}; megatron/training/training.py, `get_train_valid_test_num_samples`",
            f"--train-samples {old}"
            if running.train_samples
            else f"a number of iterations with {quantity(old, 'sample')}",
            verdict,
        )


def _changes_of_external(written: JobArguments, running: JobArguments) -> Iterator[OrderChange]:
    """Yield all that is known of a loader of one's own, whose states are those of data-parallel ranks."""
    if saves_loader_states(written) and saves_loader_states(running):
        yield from loader_changes(written, running)
        return
    yield OrderChange(
        "--dataloader-type external", "the loader is the script's own, and its order is not recorded",
        "megatron/training/datasets/data_samplers.py, `build_pretraining_data_loader`", verdict=UNKNOWN,
        uncounted="the order of a loader of one's own is not recorded",
    )  # fmt: skip


def _note_of_ignored_ramp(written: JobArguments, running: JobArguments, consumed: int) -> str:
    """Say that the release ignores a ramp of the batch that was in progress; empty otherwise."""
    was_ramping = len(sizes_to_come(written, consumed)) > 1
    if not running.rampup_batch_size or sizes_to_come(running, consumed) or not was_ramping:
        return ""
    return f"this Megatron ignores --rampup-batch-size: the global batch is {global_batch_of(running)} at once"


def _note(written: JobArguments, running: JobArguments, samples: int | None) -> str:
    """Return how `cyclic`, or a saved loader, goes on under another layout; empty if it is as before."""
    if saves_loader_states(running):
        return redistribution(written, running)
    if _loader(running) != CYCLIC:
        return ""
    history: Sequence[ReadingLayout] = history_of(written, running)
    if len(history) < 2:
        return ""
    before, now = history[-2:]
    note = f"the epoch in progress is read to its end in the order in which it began ({before} before, {now} now)"
    if samples is None or len(history) > 2:  # several layouts have read the data, in an order that is not stock's
        return note
    counts = _counts_by_layout(written, running, samples)
    return f"{note}; stock Megatron would {counts}" if isinstance(counts, ReadCounts) else f"{note}; stock: {counts}"
