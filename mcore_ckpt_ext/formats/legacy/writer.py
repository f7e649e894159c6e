"""Writes the legacy format `torch`: the pickles of each model-parallel rank, for one layout.

Sources: `save_checkpoint`, `get_checkpoint_name` and `generate_state_dict` (megatron/training/checkpointing.py,
core_v0.9.0 to 0.19.2).
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any, cast

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.formats.expert_states import about_emptied, emptied_state, joined_state
from mcore_ckpt_ext.formats.laid_out import OutputPlan, check_iteration, iteration
from mcore_ckpt_ext.formats.legacy.flat_state import FlatStates
from mcore_ckpt_ext.formats.legacy.models import TargetModels
from mcore_ckpt_ext.formats.legacy.options import Legacy
from mcore_ckpt_ext.formats.legacy.ranks import MODEL_FILE, OPTIMIZER_FILE, LegacyRank
from mcore_ckpt_ext.formats.legacy.target_arguments import reader_arguments
from mcore_ckpt_ext.formats.legacy.whole_state import WholeStates
from mcore_ckpt_ext.formats.portable_state import SHARDING_MARK, PortableState, mark_undistributed, portable_chain
from mcore_ckpt_ext.formats.target import version_number
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.vocabulary import vocabulary_rows
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import CHOOSES_CHECKPOINT_FORMATS
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.parameter_parts import check_recoverable
from mcore_ckpt_ext.layout.rank_grid import RankGrid
from mcore_ckpt_ext.model_space.anatomy import language_prefix
from mcore_ckpt_ext.model_space.names import EXTRA_STATE, parse
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.planning.write_plan import Output, OutputFile, Record, WriteItem
from mcore_ckpt_ext.storage.archive_writer import plan_archive
from mcore_ckpt_ext.storage.te_extra_state import UnknownStateError


class LegacyTarget:
    """Lays out one iteration folder for the layout in the given arguments.

    Args:
        checkpoint: the source.
        arguments: Megatron's arguments of the job that will read it.
        version: the version of Megatron that will read it.
    """

    def __init__(self, checkpoint: CheckpointView, arguments: JobArguments, version: tuple[int, int]) -> None:
        """Raise UnsupportedCheckpointError if that layout or version cannot be written."""
        if not CHOOSES_CHECKPOINT_FORMATS.is_of(version):
            raise UnsupportedCheckpointError(
                "legacy files are not written for that version",
                found=f"{version[0]}.{version[1]}",
                expected=f"{CHOOSES_CHECKPOINT_FORMATS.since} or later",
            )
        self._checkpoint = checkpoint
        self._arguments = arguments
        self._version = version
        self._unjoined: list[str] = []
        self.layout = ParallelLayout.from_arguments(arguments)
        if self.layout.expert_tensor != self.layout.tensor:
            raise UnsupportedCheckpointError(
                "legacy files do not record which part of its experts a rank has",
                found=str(self.layout),
                hint="choose equal expert and model tensor-parallel sizes, or use --to torch_dist",
            )
        if arguments.overlap_param_gather_with_optimizer_step:
            raise UnsupportedCheckpointError(
                "--overlap-param-gather-with-optimizer-step splits the optimizer in a way that cannot be written",
                hint="use --to torch_dist",
            )

    def output(self) -> Output:
        """Plan all rank files, and the location of each tensor."""
        files: list[OutputFile] = []
        records: list[Record] = []
        for rank in self._ranks():
            states: dict[str, Any] = {MODEL_FILE: self._rank_state(rank)}
            if self._flat is not None and (buffers := self._flat.buffers(rank)) is not None:
                states[OPTIMIZER_FILE] = buffers
            for name, state in states.items():
                path = f"{rank.folder(self.layout)}/{name}"
                archive = plan_archive(state)
                files.append(OutputFile(path, archive.length, archive.literals))
                for tensor in archive.tensors:
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    content = cast("tuple[WriteItem, ...]", tensor.tag)  # set by `TargetModels.part` and `FlatStates`
                    records.append(Record(path, tensor.offset, dtype, tensor.numel, content, tensor.checksums))
        return Output(files, records, tuple(self._notes()))

    def _notes(self) -> Iterator[str]:
        """Yield notes for the user of the files."""
        if self._whole is None:
            yield f"parameters in gradient buffers: the order of {self._models.order.label}"
        elif any(SHARDING_MARK in child for child in self._checkpoint.optimizer.chained_optimizer_settings()):
            yield "the optimizer is written whole, what was distributed, too: without --use-distributed-optimizer"
        else:
            yield "the optimizer is written as it was: without --use-distributed-optimizer"
        if self.layout.virtual_pipeline > 1:
            yield (
                f"for a job with {self.layout.virtual_pipeline} model chunks (virtual stages) on each pipeline rank; "
                "for one without: --virtual-pipeline-model-parallel-size 1"
            )
        if rows := self._arguments.padded_vocab_size:
            yield (
                f"the embedding has {quantity(rows, 'row')}: a job that pads differently needs "
                f"--make-vocab-size-divisible-by {rows // self.layout.tensor}"
            )
            stored = vocabulary_rows(self._checkpoint) or rows
            if stored > rows:
                cut = quantity(stored - rows, "row of the vocabulary is", "rows of the vocabulary are")
                yield f"the last {cut} cut: that job has {rows}"
        yield from self._state.notes
        yield from about_emptied(self._unjoined)
        if not self._same_ranks:
            yield "the state of the random generators belongs to other ranks: resume with --no-load-rng"

    def _ranks(self) -> Iterator[LegacyRank]:
        layout = self.layout
        for tensor, pipeline, expert in product(range(layout.tensor), range(layout.pipeline), range(layout.expert)):
            yield LegacyRank(tensor, pipeline, expert)

    @cached_property
    def _models(self) -> TargetModels:
        return TargetModels(self._checkpoint, self._arguments, self.layout, self._version)

    @cached_property
    def _state(self) -> PortableState:
        return PortableState.of(self._checkpoint, argparse.Namespace(**self._arguments.raw), self._version)

    @cached_property
    def _writers(self) -> Mapping[tuple[int, int, int], int]:
        """The global rank that would have written each rank's files."""
        return RankGrid(self.layout, bool(self._arguments.use_tp_pp_dp_mapping)).first_ranks

    def _rank_state(self, rank: LegacyRank) -> dict[str, Any]:
        """Return the content of `generate_state_dict` for a rank."""
        state = dict(self._state.common)
        if (writer := self._writers.get((rank.tensor, rank.pipeline, rank.expert))) is not None:
            state["args"] = argparse.Namespace(**{**vars(state["args"]), "rank": writer})
        chunks = [self._chunk(rank, stage) for stage in self._models.stages]
        if len(chunks) == 1:
            state["model"] = chunks[0]
        else:
            state |= {f"model{number}": chunk for number, chunk in enumerate(chunks)}
        if self._whole is not None:
            parameters = [name for stage in self._models.stages for name in self._models.parameters(rank, stage)]
            state["optimizer"] = self._whole.state_of_rank(
                parameters, lambda kind, name: self._models.part(name, rank, kind)
            )
        elif self._flat is not None:
            state["optimizer"] = self._flat.settings(rank)
        if self._same_ranks:
            state["rng_state"] = self._state.random_states[rank.pipeline, rank.tensor]
        return state

    def _chunk(self, rank: LegacyRank, stage: int) -> OrderedDict[str, Any]:
        """Return the `state_dict` of one model chunk, with parameters in the order of registration."""
        models = self._models
        last = self._models.is_last(rank, stage)
        tied_copy = last and models.local.has_tied_copy
        chunk: OrderedDict[str, Any] = OrderedDict()
        for name in [*models.parameters(rank, stage), *models.module_buffers(rank, stage)]:
            chunk[models.local_name(name, rank, stage, tied_copy)] = models.part(name, rank)
        by_module: dict[str, list[str]] = {}
        for name in models.extra_states(rank, stage, self._state.extra_states):
            by_module.setdefault(models.local_name(name, rank, stage), []).append(name)
        for module, names in by_module.items():
            chunk[module] = self._extra_state(names)
        if last:
            # The output layer is a ColumnParallelLinear, which has an extra state.
            before = language_prefix(models.local.word_embeddings or "")
            chunk.setdefault(f"{before}output_layer.{EXTRA_STATE}", None)
        return chunk

    def _extra_state(self, names: Sequence[str]) -> Any:
        """Return the extra state of a module; for grouped experts, the joined states of all."""
        states = [self._state.extra_states[name] for name in sorted(names, key=lambda name: parse(name).expert or 0)]
        try:
            return joined_state(states) if len(states) > 1 else states[0]
        except UnknownStateError:
            self._unjoined.append(names[0])
            return emptied_state(states[0])

    @property
    def _same_ranks(self) -> bool:
        """True if the target has the ranks of the source, so that their random states apply."""
        layout = self.layout
        source = self._checkpoint.job.layout
        expected = set(product(range(layout.pipeline), range(layout.tensor)))
        same = (layout.tensor, layout.pipeline) == (source.tensor, source.pipeline)
        return same and set(self._state.random_states) == expected

    @cached_property
    def _whole(self) -> WholeStates | None:
        """The writer of optimizers that are not distributed; None if there are none."""
        apart = self.layout.expert > 1
        chain = portable_chain(
            self._checkpoint.optimizer.chained_optimizer_settings() if self._checkpoint.optimizer.format() else [],
            apart,
        )
        return WholeStates(self._checkpoint, mark_undistributed(chain), apart) if chain else None

    @cached_property
    def _flat(self) -> FlatStates | None:
        """The writer of distributed optimizers; None if there are none."""
        if self._checkpoint.optimizer.format() is None or self._whole is not None:
            return None
        return FlatStates(self._checkpoint, self._models, self.layout, self._version)


def lay_out(checkpoint: CheckpointView, target: Legacy, family: Family | None) -> OutputPlan:
    """Lay out a run folder with one iteration.

    Raises:
        UnsupportedCheckpointError: the format, that version or that layout cannot hold this checkpoint.
        UsageError: the layout is unknown.
    """
    check_iteration(checkpoint, target)
    arguments = reader_arguments(checkpoint, target)
    if checkpoint.model.has_norms_of_all_heads and (arguments.tensor_model_parallel_size or 1) > 1:
        raise UnsupportedCheckpointError(
            "the tensor-parallel split of the norms of this model's queries and keys is unknown",
            found="norms across all heads, which Megatron Core does not have",
            where=str(checkpoint.files.folder),
            hint="use --to torch_dist, which Megatron-Bridge reads under any layout",
        )
    check_recoverable(checkpoint.names(WEIGHT))
    written = LegacyTarget(checkpoint, arguments, version_number(target.megatron_version))
    return iteration(checkpoint, target, written.output())
