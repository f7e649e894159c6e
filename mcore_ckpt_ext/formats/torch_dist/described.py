"""A checkpoint whose job may have to be described by auxiliary files, its index, or its user."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from typing_extensions import Self, override

from mcore_ckpt_ext.errors import PackingError
from mcore_ckpt_ext.formats.adjacent_model import adjacent_model_folder, with_adjacent_model
from mcore_ckpt_ext.formats.auxiliary_files import auxiliary_files
from mcore_ckpt_ext.formats.description import (
    ARGUMENTS,
    Description,
    complete,
    describe_job,
    find_contradictions,
    megatron_arguments,
    refuse_facts,
    stored_arguments,
)
from mcore_ckpt_ext.formats.external_weights import (
    arguments_of_model,
    check_belonging,
    check_external_weights,
    external_weights,
    other_weights_error,
)
from mcore_ckpt_ext.formats.messages import general_notices
from mcore_ckpt_ext.formats.open_options import DEFAULT_OPTIONS, OpenOptions
from mcore_ckpt_ext.formats.parts import Files, Job, StoredWeights, lazy
from mcore_ckpt_ext.formats.reader import FormatReader
from mcore_ckpt_ext.formats.torch_dist.inference import infer_layout, infer_model_config, possible_layouts
from mcore_ckpt_ext.formats.view import CheckpointView, OpenedFormat
from mcore_ckpt_ext.formats.weights_view import with_file_names
from mcore_ckpt_ext.job.facts import NOTHING
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.loops.verl import STEP
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.layout.weight_spec import WeightSpec
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex
from mcore_ckpt_ext.storage.overlay_reader import OverlayReader
from mcore_ckpt_ext.transfer import Transfer


@dataclass(frozen=True)
class ExternalModel:
    """The model of an optimizer that is stored without its weights.

    Attributes:
        weights: the specification of each weight, by model-space name.
        checkpoint: the checkpoint that contains the weights; None if a live job has them.
        layout: assumed sizes of the layout of the optimizer's job, under Megatron's names.
    """

    weights: Mapping[str, WeightSpec] = field(default_factory=dict)
    checkpoint: CheckpointView | None = None
    layout: Mapping[str, int] = field(default_factory=dict)


class DescribedCheckpoint(FormatReader):
    """A checkpoint with an index of its arrays and objects."""

    index: DcpIndex

    def __init__(
        self,
        folder: Path,
        options: OpenOptions = DEFAULT_OPTIONS,
        *,
        external: ExternalModel | None = None,
        opened: Self | None = None,
    ) -> None:
        """Open a folder.

        Args:
            folder: see `FormatReader`.
            options: see `FormatReader`.
            external: the model, if the weights are not in the checkpoint.
            opened: the same checkpoint, opened without `external`; its index and common state are reused.

        Raises:
            UsageError: facts are passed for a checkpoint with arguments, or contradict the checkpoint.
        """
        super().__init__(folder, options)
        self._external = external or ExternalModel()
        self._opened = opened
        self._weights_source = self._external.checkpoint
        if opened is not None:
            self.folder_index = opened.folder_index
            self.index = opened.index
        else:
            self.index = self._read_index()
        if options.facts != NOTHING and ARGUMENTS in self.job.common() and self.job.arguments().is_complete:
            refuse_facts(options.facts, folder)

    @abstractmethod
    def _read_index(self) -> DcpIndex:
        """Read the index; of the job's properties, only `recorded_arguments` is available yet."""

    @cached_property
    @override
    def format(self) -> OpenedFormat:
        return replace(
            super().format,
            notices=self._notices,
            with_weights_of=self._with_weights_of,
            with_weights_of_a_job=self._with_weights_of_a_job,
        )

    @cached_property
    @override
    def files(self) -> Files:
        stored = super().files
        files = replace(
            stored,
            index=lambda: self.index,
            stored_index=lambda: self._stored_index,
            auxiliary_files=lambda: {**self._files_of_adjacent_model(), **stored.auxiliary_files()},
        )
        if self._weights_source is None:
            return files
        reader = OverlayReader(files.reader, self._weights_source.files.reader)
        return replace(files, reader=reader, transfer=Transfer(reader))

    @property
    def _stored_index(self) -> DcpIndex:
        """The index by its stored keys."""
        return self.index

    @cached_property
    @override
    def model(self) -> StoredWeights:
        source = self._weights_source
        reader = self.files.reader
        if source is None or not isinstance(reader, OverlayReader):
            return super().model
        return replace(super().model, weights=lazy(lambda: with_file_names(source.model.weights(), reader.name_of)))

    @cached_property
    @override
    def job(self) -> Job:
        job = super().job
        return replace(
            job,
            common=job.common if self._opened is None else self._opened.job.common,
            arguments=lazy(self._arguments),
            iteration=lambda: job.iteration() if (step := self._step_of_folder()) is None else step,
            models=lazy(self._models) if self._external.weights else job.models,
            vocabulary=lambda: self._weights_source.job.vocabulary() if self._weights_source else None,
            described_by=lambda: self.description.source,
            problems=lambda: self.description.problems,
        )

    def _arguments(self) -> JobArguments:
        arguments = self._megatron_arguments
        return arguments if arguments is not None and arguments.is_complete else self.description.arguments

    @cached_property
    def recorded_arguments(self) -> JobArguments:
        """The properties of the job that are known without the index."""
        arguments = self._megatron_arguments
        return arguments if arguments is not None and arguments.is_complete else self._describe().arguments

    @cached_property
    def _megatron_arguments(self) -> JobArguments | None:
        """Megatron's arguments, possibly incomplete; None if the checkpoint has none."""
        common = self.job.common()
        if ARGUMENTS not in common:
            return None
        return megatron_arguments(stored_arguments(common), self.folder, self.job.found_sidecar().sidecar)

    def _describe(self) -> Description:
        """Describe the job by auxiliary files and the user's options."""
        sidecar = self.job.found_sidecar().sidecar
        return describe_job(self.files.reader, self._megatron_arguments, sidecar, self.options.facts)

    @cached_property
    def description(self) -> Description:
        """The properties of the job, from Megatron's arguments, or else from auxiliary files and the index.

        Raises:
            UsageError: a property that the user passes contradicts the index.
        """
        arguments = self._megatron_arguments
        if arguments is not None and arguments.is_complete:
            return Description(arguments, problems=find_contradictions(arguments, self.folder))
        description = self._describe()
        external = self._external
        if self._weights_source is not None:
            description = description.with_model(arguments_of_model(self._weights_source))
        else:
            description = with_adjacent_model(description, self.model.weights(), self.folder)
        grid = self.states.random_grid()
        layout = infer_layout(self.index, grid, {**description.arguments.raw, **external.layout})
        model = infer_model_config(self.index.arrays, self.model.weights().names() or external.weights)
        return complete(description, {**model, **layout}, self.options.facts, self.folder)

    def _with_weights_of_a_job(self, weights: Mapping[str, WeightSpec]) -> CheckpointView:
        reader = self._with(ExternalModel(weights))
        # A reader that fills an optimizer verifies every element, so a layout may be tried that merely fits.
        return (reader._under_a_layout(_fits) or reader).view

    def _with_weights_of(self, source: CheckpointView) -> CheckpointView:
        check_external_weights(source, self.view)
        external = ExternalModel(checkpoint=source)
        external = replace(external, weights=external_weights(source, self._with(external).job.arguments()))
        unproven = self._with(external)
        proven = unproven._under_a_layout(_is_proven)
        if proven is None:
            raise other_weights_error(
                "they fit under no layout that its buffers allow", unproven.view, source.files.folder
            )
        check_belonging(proven.view, source.files.folder)
        return proven.view

    def _external_archives(self) -> Iterator[tuple[str, int, int]]:
        """Yield all archives of the other checkpoint that contains the weights, if any."""
        if self._weights_source is not None and isinstance(self.files.reader, OverlayReader):
            for file, offset, length in self._weights_source.files.archives():
                yield self.files.reader.name_of(file), offset, length

    def _with(self, external: ExternalModel) -> Self:
        return type(self)(self.folder, self.options, external=external, opened=self._opened or self)

    def _under_a_layout(self, holds: Callable[[Self], bool]) -> Self | None:
        """Return the reader under a layout for which `holds` is true if the layout is unknown.

        Returns:
            None without such a layout.
        """
        if "tensor" not in self.job.layout.unknown or not (sizes_to_try := possible_layouts(self.index)):
            return self
        candidates = (self._with(replace(self._external, layout=sizes)) for sizes in sizes_to_try)
        return next((candidate for candidate in candidates if holds(candidate)), None)

    def _models(self) -> LocalModels:
        job = self.job
        weights = self._external.weights
        stored = {
            name: weight.stored_weight(job.layout.tensor, job.layout.expert_tensor) for name, weight in weights.items()
        }
        return LocalModels(stored, job.arguments(), job.layout, self.optimizer.has_expert_optimizer(), job.layers())

    def _step_of_folder(self) -> int | None:
        """Return the step in the name of a folder, as verl names them, if the common state has no iteration."""
        above = (self.folder, *self.folder.parents[:3])
        step = next((match for folder in above if (match := STEP.fullmatch(folder.name))), None)
        return int(step[1]) if "iteration" not in self.job.common() and step else None

    def _files_of_adjacent_model(self) -> dict[str, bytes]:
        adjacent = adjacent_model_folder(self.folder)
        return auxiliary_files(adjacent) if adjacent is not None else {}

    def _notices(self, view: CheckpointView) -> list[str]:
        about_weights = (
            [
                f"the weights are those of {self._weights_source.files.folder}",
                *self._weights_source.format.notices(self._weights_source),
            ]
            if self._weights_source
            else []
        )
        return [*self.description.problems, *general_notices(view), *about_weights]


def _fits(reader: FormatReader) -> bool:
    return all(
        packing is not None
        for buffers in reader.optimizer.state().buffers
        for packing in buffers.proposed_packings().values()
    )


def _is_proven(reader: FormatReader) -> bool:
    with contextlib.suppress(PackingError):
        return all(
            buffers.packing_of(group)
            for buffers in reader.optimizer.state().buffers
            for group in buffers.groups.values()
        )
    return False
