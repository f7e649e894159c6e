"""The data set of a job: its blend, its split, and what depends on the number of its samples.

A data set is built for a number of samples. Megatron shuffles the documents of as many passes as these need, and the
last pass apart from the others if little of it is needed: the order is the same for two numbers if both give the same
passes. No checkpoint has the number of tokens from which these follow; a job finds it in the index of its data.

Sources, core_v0.16.1 to 0.19.2 and the development head of August 2026: `get_blend_from_list` and `normalize`
(megatron/core/datasets/utils.py), `parse_and_normalize_split` (blended_megatron_dataset_config.py),
`BlendedMegatronDatasetBuilder` (blended_megatron_dataset_builder.py), `GPTDataset._get_num_epochs` and
`_build_document_sample_shuffle_indices` (gpt_dataset.py); `SFTDataset` (megatron/training/datasets/sft_dataset.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.continuity.cyclic import CYCLIC
from mcore_ckpt_ext.continuity.data_files import BLEND_FILES, DataFiles, have_same_sizes
from mcore_ckpt_ext.continuity.features import is_tuned
from mcore_ckpt_ext.continuity.order_change import CHANGES, SAME_ORDER, UNKNOWN
from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.lazy_torch import numpy

Tokens = Callable[[str, float], "int | None"]
"""Returns the tokens of the first share of a data set's documents, by its path; None if they are unknown."""
_DRAWN = "the random sampler draws from another number of samples"


@dataclass(frozen=True, slots=True)
class Blend:
    """The data sets that are mixed.

    Attributes:
        weights: the share of each; None if each has its own length.
        paths: where they lie.
    """

    weights: tuple[float, ...] | None
    paths: tuple[str, ...]

    @classmethod
    def of(cls, value: object) -> Blend:
        """Return the blend that the words of a flag describe: paths alone, or weights and paths in turn."""
        words = [str(word) for word in (value if isinstance(value, (list, tuple)) else [value])]
        try:
            weights = _shares_of([float(word) for word in words[::2]]) if len(words) % 2 == 0 else []
        except ValueError:
            weights = []
        return cls(tuple(weights), tuple(words[1::2])) if weights else cls(None, tuple(words))

    @property
    def names(self) -> list[str]:
        """The names of the data sets, wherever they lie."""
        return [path.rpartition("/")[2] for path in self.paths]

    @property
    def joins_whole(self) -> bool:
        """True if each of several data sets is read once, in proportion to its length."""
        return self.weights is None and len(self.paths) > 1


@dataclass(frozen=True, slots=True)
class Passes:
    """How the documents of a data set are shuffled.

    Attributes:
        number: over how many passes.
        has_last_apart: whether the last one is shuffled apart from the others.
    """

    number: int
    has_last_apart: bool

    @classmethod
    def over(cls, tokens: int, samples: int, length: int) -> Passes:
        """Return the passes over a data set with so many tokens, for so many samples of a length.

        Each sample but the last shares a token with the next: its labels are one token ahead.
        """
        number = max(1, -(-(samples * length + 1) // tokens))
        of_last = samples - ((number - 1) * tokens - 1) // length
        return cls(number, number > 1 and of_last < int(0.8 * ((tokens - 1) // length)))

    def __str__(self) -> str:
        return quantity(self.number, "pass", "passes") + (", the last one apart" if self.has_last_apart else "")


def training_share(split: str) -> float | str:
    """Return the share of the documents that training has; the text itself if Megatron refuses it."""
    try:
        return _shares_of([float(part) for part in re.findall(r"[.0-9]+", split)])[0]
    except (ValueError, IndexError):
        return split


def training_blend(job: JobArguments) -> Blend | None:
    """Return the blend that a job trains on; None if neither its flags nor a recorded file say it.

    Megatron ignores the weight of the only path of `--train-data-path`, and of a file for each split.
    """
    recorded = DataFiles.of(job).words
    if words := job.raw.get("data_path") or (job.raw.get("data_args_path") and recorded):
        return Blend.of(words)
    if not (words := job.raw.get("train_data_path") or recorded):
        return None
    blend = Blend.of(words)
    return blend if len(blend.paths) > 1 else Blend(None, blend.paths)


def comparable(name: str, value: Any) -> Any:
    """Return the value of an argument, the same for two that Megatron does not distinguish."""
    if name == "split" and isinstance(value, str):
        return training_share(value)
    if value and (name.endswith("data_path") or (name in BLEND_FILES and not isinstance(value, str))):
        return Blend.of(value)
    return [str(part) for part in value] if isinstance(value, (list, tuple)) else value or None


def is_same_blend(old: object, new: object) -> bool:
    """Return whether two blends mix data sets of the same names in the same way, wherever these lie."""
    if not isinstance(old, Blend) or not isinstance(new, Blend):
        return False
    return (old.weights, old.names) == (new.weights, new.names)


def keeps_blend(written: JobArguments, running: JobArguments) -> bool:
    """Return whether two jobs are known to have the same blend, whichever flag or file says so."""
    old, new = (training_blend(job) for job in (written, running))
    if old is None or new is None or not is_same_blend(old, new) or _names_splits(written) != _names_splits(running):
        return False
    return old.paths == new.paths or have_same_sizes(written, running)


def _names_splits(job: JobArguments) -> bool:
    """Return whether a job names data sets for each split, so that training has all of their documents."""
    return not (job.raw.get("data_path") or job.raw.get("data_args_path"))


def changed_sizes(written: JobArguments, running: JobArguments) -> Iterator[tuple[str, int, int]]:
    """Yield the path of each data set whose size differs between two jobs, and both sizes in bytes."""
    old, new = (DataFiles.of(job).sizes for job in (written, running))
    blend = training_blend(running)
    if blend is None or not is_same_blend(training_blend(written), blend) or len(old) != len(new):
        return
    yield from ((path, was, now) for path, was, now in zip(blend.paths, old, new, strict=False) if was != now)


def may_have_weights(job: JobArguments) -> bool:
    """Return False for a job whose data sets have no weights, for certain."""
    blend = training_blend(job)
    return blend is None or blend.weights is not None


def samples_built_for(job: JobArguments) -> int | None:
    """Return the number of samples that a job's data set is built for.

    Source: `get_train_valid_test_num_samples`, megatron/training/training.py, core_v0.7.0 to 0.19.2.
    """
    if job.train_samples:
        return job.train_samples
    return job.train_iters * job.global_batch_size if job.train_iters and job.global_batch_size else None


def effect_of_size(job: JobArguments, old: int, new: int, tokens: Tokens) -> tuple[str, str]:
    """Return whether a data set for another number of samples keeps its order, or why not.

    Args:
        job: the arguments of the job.
        old: the number of samples until now.
        new: the other number.
        tokens: returns the tokens of a data set.
    """
    blend = training_blend(job)
    joins_whole = blend is not None and blend.joins_whole
    # The samples of `--sft` are read as they lie, from the first on, again and again.
    is_read_in_place = is_tuned(job)
    if job.dataloader_type == CYCLIC and (is_read_in_place or (blend is not None and blend.weights)):
        return CHANGES, _DRAWN
    if job.dataloader_type == CYCLIC and joins_whole:
        return UNKNOWN, f"{_DRAWN}, unless both are at least those of one pass"
    if is_read_in_place or joins_whole:
        return SAME_ORDER, ""
    before, now = (_passes(job, blend, samples, tokens) for samples in (old, new))
    if blend is None or before is None or now is None:
        return UNKNOWN, (
            "the order is the same only if both shuffle as many passes over the documents of each data set, the last "
            "one apart in both or in neither"
        )
    for path, was, is_now in zip(blend.paths, before, now, strict=True):
        if was != is_now:
            return CHANGES, f"the documents of {path} are shuffled over {is_now}, before over {was}"
    return SAME_ORDER, ""


def _passes(job: JobArguments, blend: Blend | None, samples: int, tokens: Tokens) -> list[Passes] | None:
    """Return the passes over each data set of a blend; None if they are unknown.

    The data sets of T5, whose scripts need `--decoder-seq-length`, are shuffled otherwise, as those of BERT are.
    """
    length = None if job.raw.get("decoder_seq_length") else job.seq_length
    split = job.raw.get("split")
    share = training_share(split) if split else 1.0
    if blend is None or not length or job.phase_transition_iterations or not isinstance(share, float):
        return None
    counts = [count for path in blend.paths if (count := tokens(path, share))]
    if len(counts) < len(blend.paths):
        return None
    surplus = job.raw.get("mid_level_dataset_surplus")
    sizes = [samples]
    if blend.weights:
        if not isinstance(surplus, (int, float)):
            return None
        sizes = [math.ceil(math.ceil(samples * weight) * (1 + surplus)) for weight in blend.weights]
    return [Passes.over(count, size, length) for count, size in zip(counts, sizes, strict=True)]


def _shares_of(weights: Sequence[float]) -> list[float]:
    """Return weights whose sum is 1, to the bit those of Megatron.

    Raises:
        ValueError: they have no such sum.
    """
    if not 0 < sum(weights) < math.inf:
        raise ValueError("no positive sum")
    shares: list[float] = (numpy.array(weights) / numpy.sum(weights)).tolist()
    return shares
