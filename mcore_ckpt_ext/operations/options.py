"""The options of each operation, as objects that the command line, the Python API and `--json` share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

from typing_extensions import Self

from mcore_ckpt_ext.defaults import DEFAULT_MEMORY, DEFAULT_WORKERS
from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.job.facts import NOTHING, Facts

Location: TypeAlias = str | os.PathLike[str]


class Options:
    """The options of an operation, as a dataclass."""

    def with_changes(self, changes: Mapping[str, object]) -> Self:
        """Return these options with changes by name.

        Raises:
            TypeError: there is no option of that name.
        """
        return cast("Self", replace(cast("Any", self), **changes))


@dataclass(frozen=True, kw_only=True)
class ConversionOptions(Options):
    """Options of a conversion.

    Attributes:
        family: the model family of a Hugging Face folder, if it is not recognized: a name, or `path.py:Class`, which is
            executed.
        accept_keys: keys of a Hugging Face folder's `config.json` that have no effect on what the model computes.
        workers: the number of records that are written at the same time.
        memory_limit: the maximum number of bytes of the blocks of all workers together.
        force: replace the destination.
        resume: continue an interrupted conversion of the same source with the same options.
        dry_run: only report what would be done.
        accept_lost: convert although the source lacks elements of the optimizer; their masters are taken from the
            weights, their moments become zero.
        drop: kinds of optimizer state to leave out because they cannot be converted; `optimizer` leaves all of it out.
        facts: facts about the job that wrote a source without Megatron's arguments.
        weights: the path of the weights, if the source holds only an optimizer: a Hugging Face folder, or a checkpoint.
        merge: the model into which the source's adapters are merged: a Hugging Face folder or a checkpoint, or the
            source itself if it contains the model.
    """

    family: str | None = None
    accept_keys: Sequence[str] = ()
    workers: int = DEFAULT_WORKERS
    memory_limit: int = DEFAULT_MEMORY
    force: bool = False
    resume: bool = False
    dry_run: bool = False
    accept_lost: bool = False
    drop: str | Sequence[str] = ()
    facts: Facts = NOTHING
    weights: Location | None = None
    merge: Location | None = None

    @property
    def dropped(self) -> Sequence[str]:
        """The kinds to leave out, also if only one is named."""
        return [self.drop] if isinstance(self.drop, str) else self.drop


@dataclass(frozen=True, kw_only=True)
class VerificationOptions(Options):
    """Options of a verification.

    Attributes:
        quick: check only metadata.
        workers: the number of threads.
        facts: facts about the job that wrote a checkpoint without Megatron's arguments.
        weights: the path of the weights, if the checkpoint holds only an optimizer, whose masters they verify; for
            adapters, the path of their model.
        record: a manifest to write, with the SHA-256 of each file and each tensor, if there is no error.
        against: a manifest to compare with.
        tensors_only: compare only tensors with the manifest, since a conversion changes all files.
    """

    quick: bool = False
    workers: int = DEFAULT_WORKERS
    facts: Facts = NOTHING
    weights: Location | None = None
    record: Location | None = None
    against: Location | None = None
    tensors_only: bool = False

    @property
    def hashes_tensors(self) -> bool:
        """True if the SHA-256 of each tensor is needed."""
        return self.record is not None or self.tensors_only

    @property
    def hashes_files(self) -> bool:
        """True if the SHA-256 of each file is needed."""
        return self.record is not None or (self.against is not None and not self.tensors_only)

    def check(self) -> None:
        """Check that the options are compatible with each other.

        Raises:
            UsageError: they contradict each other.
        """
        if self.quick and (self.record is not None or self.against is not None):
            raise UsageError("a manifest is of all bytes, which --quick does not read", hint="leave out --quick")
        if self.tensors_only and self.against is None:
            raise UsageError("--tensors-only needs a manifest to compare with", hint="--against FILE")


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(Options):
    """Options of a comparison.

    Attributes:
        kinds: the kinds to compare; by default all kinds that one of the two has, or with a Hugging Face folder all
            kinds that both have.
        family: the family of a Hugging Face folder, as for a conversion.
        facts: facts about the jobs that wrote checkpoints without Megatron's arguments.
        weights: the path of the weights for checkpoints that hold only an optimizer.
        workers: the number of threads.
        pictures: also show where in each tensor the differences are, and how large.
        tensors_only: ignore settings (learning rates, decay, scheduler, counters, random states).
    """

    kinds: Sequence[str] | None = None
    family: str | None = None
    facts: Facts = NOTHING
    weights: Location | None = None
    workers: int = DEFAULT_WORKERS
    pictures: bool = False
    tensors_only: bool = False


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """Options of a plan.

    Attributes:
        gpus_per_node: the GPUs of a node; layouts with larger tensor parallelism cross nodes, and come last.
        gpu_memory: bytes of a GPU; by default at least the need of the old layout by the same estimate.
        megatron_version: the release that will run; by default the installed one, else the newest known.
        pins: fixed sizes: `{"tp": 8}`.
        recomputation: `none`, `selective` or `full`; by default that of the job.
        read_rate: bytes a second that all GPUs together read from the store.
        most: how many layouts are listed, one of those that differ in virtual stages alone; None for all.
        facts: facts about the job that wrote a checkpoint without Megatron's arguments, such as its layout.
        arguments: arguments of the job that the checkpoint does not state, by name.
        data_samples: the samples of the data set, to count those that a random sampler reads again or never.
    """

    gpus_per_node: int = 8
    gpu_memory: int | None = None
    megatron_version: str | None = None
    pins: Mapping[str, int] = field(default_factory=dict)
    recomputation: str | None = None
    read_rate: int | None = None
    most: int | None = 10
    facts: Facts = NOTHING
    arguments: Mapping[str, object] = field(default_factory=dict)
    data_samples: int | None = None


@dataclass(frozen=True, kw_only=True)
class RehearsalOptions(Options):
    """Options of a rehearsal.

    Attributes:
        megatron_version: the release that would run; by default the installed one, else that of the checkpoint.
        full: compare all masters with their weights, not only samples.
        arguments: arguments of the job that wrote the checkpoint, if the checkpoint does not store them.
        changes: arguments of the resuming job that differ, other than its layout.
        any_change: all arguments may be changed, if the shapes of the checkpoint's model are unchanged.
    """

    megatron_version: str | None = None
    full: bool = False
    arguments: Mapping[str, object] = field(default_factory=dict)
    changes: Mapping[str, object] = field(default_factory=dict)
    any_change: bool = False
