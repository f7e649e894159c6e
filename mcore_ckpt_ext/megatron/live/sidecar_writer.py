"""The sidecars of a running job: the packing of buffers, gathered once, written with each save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from mcore_ckpt_ext import __version__
from mcore_ckpt_ext.collectives import attempt, gather, list_reasons_of_all
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.sidecar import (
    RecordedBucket,
    RecordedDigests,
    RecordedGroup,
    SaveRecord,
    Sidecar,
)
from mcore_ckpt_ext.megatron.live.digests import Digester
from mcore_ckpt_ext.megatron.live.model import Chunks
from mcore_ckpt_ext.megatron.live.recorded_groups import recorded_groups
from mcore_ckpt_ext.megatron.running_version import version_text
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.singletons import PROCESS


@dataclass(frozen=True)
class PendingSidecar:
    """A sidecar that is being made.

    Attributes:
        share: sends this rank's digests to the other ranks; collective. The optimizer may change afterwards.
        text: returns its text, given the duration of the save; empty if it cannot be made.
    """

    share: Callable[[], None]
    text: Callable[[SaveRecord | None], str]


class PackingRecorder:
    """Gathers the packing of gradient buffers once for each optimizer, and makes each save's sidecar.

    Args:
        log: logs a line.
        versions: of this package, and of megatron-core.
    """

    def __init__(self, log: Callable[[str], None], versions: tuple[str, str]) -> None:
        self._log = log
        self._versions = versions
        self._groups: WeakKeyDictionary[Any, tuple[RecordedGroup, ...]] = WeakKeyDictionary()
        self._digesters: WeakKeyDictionary[Any, Digester] = WeakKeyDictionary()

    def text(self, chunks: Callable[[], Chunks], optimizer: Any, arguments: Mapping[str, Any], iteration: int) -> str:
        """Return the text of a sidecar without the save's duration; arguments as for `begun`. Collective."""
        begun = self.begin(chunks, optimizer, arguments, iteration)
        begun.share()
        return begun.text(None)

    def begin(
        self,
        chunks: Callable[[], Chunks],
        optimizer: Any,
        arguments: Mapping[str, Any],
        iteration: int,
        in_background: bool = False,
    ) -> PendingSidecar:
        """Begin the sidecar of a save. Collective.

        Args:
            chunks: returns the unwrapped model chunks.
            optimizer: the optimizer that is saved; None if no sidecar is needed.
            arguments: Megatron's arguments of the run.
            iteration: the iteration that is saved.
            in_background: see `Digester.begin`.
        """
        if optimizer is None:
            return PendingSidecar(lambda: None, lambda saved: "")
        if optimizer not in self._groups:
            live = chunks()
            self._groups[optimizer] = self._gather_groups(live, optimizer)
            self._digesters[optimizer] = Digester(live, optimizer, self._log)
        digests = self._digesters[optimizer].begin(optimizer, in_background)
        groups = self._groups[optimizer]
        return PendingSidecar(
            digests.share, lambda saved: self._text(groups, arguments, iteration, saved, digests.recorded_digests())
        )

    def _gather_groups(self, chunks: Chunks, optimizer: Any) -> tuple[RecordedGroup, ...]:
        local_groups: list[RecordedGroup] = []
        # Every rank must reach `gather`, and the save must not fail.
        problem = attempt(lambda: local_groups.extend(recorded_groups(chunks, optimizer)))
        of_ranks = gather((local_groups, problem))
        if problems := list_reasons_of_all([text for _, text in of_ranks]):
            self._log(f"no sidecar for this job: {problems}; a resume will recover the packing instead")
            return ()
        return merge_groups(group for groups, _ in of_ranks for group in groups)

    def _text(
        self,
        groups: tuple[RecordedGroup, ...],
        arguments: Mapping[str, Any],
        iteration: int,
        saved: SaveRecord | None,
        digests: tuple[RecordedDigests, ...],
    ) -> str:
        """Return the sidecar's text; empty if it cannot be made, since a checkpoint is valid without it."""
        if not groups:
            return ""
        written_by, megatron = self._versions
        try:
            ranks = ParallelLayout.from_arguments(JobArguments.of(arguments))
            layout = {name: int(size) for name, size in ranks.sizes().items()}
            sidecar = Sidecar(f"mcore_ckpt_ext {written_by}", megatron, iteration, layout, groups, saved, digests)
            return sidecar.to_json()
        except Exception as error:  # noqa: BLE001 - see above
            self._log(f"no sidecar in iteration {iteration}: {error}; a resume will recover the packing instead")
            return ""


def packing_recorder() -> PackingRecorder:
    """Return this process's recorder of packings."""
    # After a plus sign Megatron appends the commit of the git repository that contains it.
    megatron = version_text().partition("+")[0]
    return PROCESS.one(PackingRecorder, lambda: PackingRecorder(announce, (__version__, megatron)))


def merge_groups(groups: Iterable[RecordedGroup]) -> tuple[RecordedGroup, ...]:
    """Merge groups with equal buffers, such as tensor-parallel siblings, into one entry."""
    indices: dict[tuple[int, tuple[RecordedBucket, ...]], set[int]] = {}
    for group in groups:
        indices.setdefault((group.child, group.buckets), set()).update(group.indices)
    return tuple(
        RecordedGroup(child, tuple(sorted(of_group)), buckets) for (child, buckets), of_group in indices.items()
    )
