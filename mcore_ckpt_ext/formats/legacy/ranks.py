"""The rank folders of the legacy format `torch`: their names, and the content of their pickles.

Source: megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2 (`get_checkpoint_name`, `find_checkpoint_rank_0`).
Tensor data is not read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import (
    INTERRUPTED,
    UnreadableCheckpointError,
    UnsupportedCheckpointError,
    escape,
    format_value,
    join_some,
    quantity,
)
from mcore_ckpt_ext.formats.common_state import SCHEDULERS
from mcore_ckpt_ext.job.job_arguments import FIELDS
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.rank_grid import RankGrid
from mcore_ckpt_ext.optimizers.groups import checked_optimizer
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.index_entries import StoredObject
from mcore_ckpt_ext.storage.tensor_reference import TensorReference
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
LAYER_WISE_FILES = "layer_wise_optimizer_*.pt"
"""Files of `LayerWiseDistributedOptimizer`: a data-parallel rank's own parameters (`save_checkpoint`, since 0.16)."""
_ITERATIONS = ("iteration", "total_iters")
_RANK_FOLDER = re.compile(r"^mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")
_MODEL_CHUNK = re.compile(r"^model\d*$")


@dataclass(frozen=True)
class LegacyRank:
    """The numbers of a model-parallel rank, which form the name of its folder."""

    tensor: int
    pipeline: int
    expert: int

    def folder(self, layout: ParallelLayout) -> str:
        """Return the name of the rank's folder in a job of that layout (`get_checkpoint_name`)."""
        pipeline = f"_{self.pipeline:03d}" if layout.pipeline > 1 else ""
        expert = f"_{self.expert:03d}" if layout.expert > 1 else ""
        return f"mp_rank_{self.tensor:02d}{pipeline}{expert}"

    @classmethod
    def from_folder(cls, folder: str, layout: ParallelLayout) -> LegacyRank:
        """Return the rank whose folder has this name in a job of that layout."""
        match = _RANK_FOLDER.match(folder)
        tensor, *rest = [int(number) for number in match.groups() if number is not None] if match else [0]
        # Without pipeline parallelism, the number of the expert rank has the position of the pipeline rank's.
        pipeline, expert = (*rest, 0, 0)[:2] if layout.pipeline > 1 else (0, (*rest, 0)[0])
        return cls(tensor, pipeline, expert)


_MOST_LISTED = 4


@dataclass(frozen=True)
class RankState:
    """The content of one rank's `model_optim_rng.pt`, unpickled with tensors as references."""

    rank: LegacyRank
    folder: str
    state: Mapping[str, Any]

    @property
    def file(self) -> str:
        """The path of the file relative to the iteration folder."""
        return f"{self.folder}/{MODEL_FILE}"

    @property
    def arguments(self) -> Any:
        """Megatron's arguments, as this rank stored them."""
        return self.state.get("args")

    @property
    def chunks(self) -> list[Mapping[str, Any]]:
        """The `state_dict` of each model chunk."""
        if "model" in self.state:
            return [self.state["model"]]
        return [self.state[f"model{number}"] for number in range(sum(map(is_model_chunk, self.state)))]

    @property
    def optimizers(self) -> list[Mapping[str, Any]]:
        """The state of each chained optimizer; a single optimizer is stored without a list.

        Raises:
            UnreadableCheckpointError: see `checked_optimizer`.
        """
        entry = self.state.get("optimizer") or []
        return [checked_optimizer(optimizer) for optimizer in (entry if isinstance(entry, list) else [entry])]


@dataclass(frozen=True)
class RankBuffers:
    """The content of one rank's `distrib_optim.pt`: the buffers of each chained optimizer.

    An optimizer may have None instead (see `children`).
    """

    rank: LegacyRank
    place: StoredObject
    children: Sequence[Any]
    """None if another rank's file has that optimizer's state (`ChainedOptimizer.save_parameter_state`)."""


class RankFolders:
    """All rank folders of an iteration folder; each pickle is read once."""

    def __init__(self, folder: Path, reader: FolderReader) -> None:
        self._folder = folder
        self._reader = reader
        self._states: dict[str, Mapping[str, Any]] = {}
        self._contents: dict[str, tuple[tuple[int, int], ...] | None] = {}

    @cached_property
    def first(self) -> RankState:
        """The first rank's state, which contains the job's arguments.

        Raises:
            UnsupportedCheckpointError: the checkpoint is too old, or has no arguments.
        """
        folder = folder_names(self._folder)[0]
        state = self._load(folder)
        generation = state.get("checkpoint_version", 0)
        if "args" not in state or not isinstance(generation, (int, float)) or generation < 3.0:
            raise UnsupportedCheckpointError(
                "the checkpoint was written before Megatron-LM 2.6, which ordered the rows of attention differently",
                found=f"checkpoint version {generation}",
                expected="3.0, and the job's arguments",
                where=str(self._folder),
            )
        return RankState(LegacyRank(0, 0, 0), folder, state)

    def states(self, layout: ParallelLayout) -> list[RankState]:
        """Return the states of all ranks, the first pipeline rank's first.

        Raises:
            UnreadableCheckpointError: the folders cannot come from one save of a job of that layout.
        """
        names = folder_names(self._folder)
        states = [RankState(LegacyRank.from_folder(name, layout), name, self._load(name)) for name in names]
        states.sort(key=lambda state: (state.rank.pipeline, state.rank.expert, state.rank.tensor))
        odd = _odd_places([state.rank for state in states], layout)
        if odd:
            raise UnreadableCheckpointError(
                "the checkpoint does not have the rank folders of its own layout",
                found=f"{quantity(len(states), 'folder')}; {join_some(odd, 3)}",
                expected=f"one for each place in {layout}",
                where=str(self._folder),
                hint=INTERRUPTED,
            )
        for state in states[1:]:
            self._check_time(states[0], state)
        self._check_writers(states, RankGrid(layout, bool(getattr(states[0].arguments, "use_tp_pp_dp_mapping", False))))
        self._check_different(states)
        return states

    def _check_writers(self, states: Sequence[RankState], grid: RankGrid) -> None:
        """Compare the global rank recorded in each file with the folder of the file.

        Programs that write the files of all ranks from one process (tools/checkpoint of Megatron-LM) record the same
        rank in all of them, which is ignored.

        Raises:
            UnreadableCheckpointError: a file is in the folder of another rank.
        """
        layout = grid.layout
        writers = {state.folder: getattr(state.arguments, "rank", None) for state in states}
        world = layout.tensor * layout.pipeline * layout.context * layout.data
        if len(set(writers.values())) < len(states) or layout.world != world:
            return
        for state in states:
            writer = writers[state.folder]
            if type(writer) is not int or not 0 <= writer < world:
                return
            tensor, _, _, pipeline = grid.coordinates(writer)
            is_its = (tensor, pipeline) == (state.rank.tensor, state.rank.pipeline)
            if not is_its or state.rank.expert not in grid.possible_expert_ranks(writer):
                raise self._mixed_up(
                    state, f"a file that rank {writer} wrote, {grid.place(writer)}", "that of its rank"
                )

    def _check_different(self, states: Sequence[RankState]) -> None:
        """Check by checksums, if there are any, that no two model-parallel ranks have the same content.

        Raises:
            UnreadableCheckpointError: the files of two ranks are equal.
        """
        folder_of: dict[tuple[tuple[int, int], ...], str] = {}
        for state in states:
            content = self._contents[state.folder]
            has_tensors = any(isinstance(value, TensorReference) for chunk in state.chunks for value in chunk.values())
            if has_tensors and content is not None:
                first = folder_of.setdefault(content, state.folder)
                if first != state.folder:
                    raise self._mixed_up(
                        state, f"the same content as in {first}", "a part of the model that no other has"
                    )

    def _mixed_up(self, state: RankState, actual: str, expected: str) -> UnreadableCheckpointError:
        return UnreadableCheckpointError(
            "the ranks' files are mixed up",
            found=actual,
            expected=expected,
            where=str(self._folder / state.file),
            hint="they were moved or copied: restore the folders as they were written, or use another iteration",
        )

    def _check_time(self, first: RankState, other: RankState) -> None:
        """Compare values that are equal on all ranks of one save, and that change with every iteration.

        Raises:
            UnreadableCheckpointError: a value differs.
        """
        expected = _time_of(first.state)
        actual = _time_of(other.state)
        for key in expected.keys() | actual.keys():
            if repr(actual.get(key)) != repr(expected.get(key)):  # repr, so that NaN equals itself
                raise UnreadableCheckpointError(
                    "the ranks' files were not written at the same time of one run",
                    found=f"{key} {format_value(actual.get(key))}",
                    expected=f"{format_value(expected.get(key))}, as in {first.folder}",
                    where=str(self._folder / other.file),
                    hint="a file was edited, or is of another iteration: use another iteration",
                )

    def buffer_files(self, states: Sequence[RankState]) -> list[tuple[LegacyRank, str]]:
        """Return the files of distributed optimizers with their ranks; nothing is read."""
        files = [(state.rank, f"{state.folder}/{OPTIMIZER_FILE}") for state in states]
        return [(rank, file) for rank, file in files if (self._folder / file).exists()]

    def buffers(self, files: Sequence[tuple[LegacyRank, str]]) -> list[RankBuffers]:
        """Read the content of the files of distributed optimizers."""
        rank_buffers = []
        for rank, file in files:
            content = TorchArchive(self._reader, file).load()
            rank_buffers.append(
                RankBuffers(rank, self.place(file), content if isinstance(content, list) else [content])
            )
        return rank_buffers

    def place(self, file: str) -> StoredObject:
        """Return the archive that extends over a whole file."""
        return StoredObject(file, 0, self._reader.size(file))

    def other_files(self, folder: str) -> Iterator[Path]:
        """Yield unread files of a rank folder: those of other optimizers (`layer_wise_optimizer_0.pt`)."""
        for path in sorted((self._folder / folder).glob("*.pt")):
            if path.name not in (MODEL_FILE, OPTIMIZER_FILE):
                yield path

    def layer_wise_files(self, folder: str) -> list[Path]:
        """Return the files of a LayerWiseDistributedOptimizer, one for each data-parallel rank."""
        return sorted((self._folder / folder).glob(LAYER_WISE_FILES))

    def _load(self, folder: str) -> Mapping[str, Any]:
        if folder not in self._states:
            file = f"{folder}/{MODEL_FILE}"
            archive = TorchArchive(self._reader, file)
            state = archive.load()
            if not isinstance(state, dict):
                raise UnreadableCheckpointError("a rank's state is not a dict", found=type(state).__name__, where=file)
            self._states[folder] = state
            self._contents[folder] = archive.storage_checksums
        return self._states[folder]


def _odd_places(ranks: Sequence[LegacyRank], layout: ParallelLayout) -> list[str]:
    """Describe the places of a layout that have no folder, and folders outside the layout.

    The first rank of each (tensor, pipeline, expert) place writes a folder (`save_checkpoint`, checkpointing.py,
    core_v0.7.0 to 0.19.2). If the tensor parallel size of experts equals that of other parameters, every such place
    exists. Otherwise it is only known that each expert rank of a stage has some folder.
    """
    tensors, stages, experts = (range(size) for size in (layout.tensor, layout.pipeline, layout.expert))
    pairs = {(rank.tensor, rank.pipeline) for rank in ranks}
    if odd := _describe_places(pairs, ("tensor", tensors), ("pipeline", stages)):
        return odd
    if layout.expert_tensor == layout.tensor:
        whole = {(rank.tensor, rank.pipeline, rank.expert) for rank in ranks}
        return _describe_places(whole, ("tensor", tensors), ("pipeline", stages), ("expert", experts))
    return _describe_places({(rank.pipeline, rank.expert) for rank in ranks}, ("pipeline", stages), ("expert", experts))


def _describe_places(places: Set[tuple[int, ...]], *axes: tuple[str, range]) -> list[str]:
    """Describe unexpected places, and the first missing ones, since a layout may have very many places."""
    names = [name for name, _ in axes]

    def format_place(place: tuple[int, ...]) -> str:
        return ", ".join(f"{name} {number}" for name, number in zip(names, place, strict=True))

    outside = [
        place
        for place in sorted(places)
        if any(at not in numbers for at, (_, numbers) in zip(place, axes, strict=True))
    ]
    missing = islice(
        (place for place in product(*(numbers for _, numbers in axes)) if place not in places), _MOST_LISTED
    )
    return [f"none of {format_place(place)}" for place in missing] + [
        f"an unexpected one of {format_place(place)}" for place in outside
    ]


def folder_names(folder: Path) -> list[str]:
    """Return the names of the rank folders in an iteration folder, sorted."""
    return sorted(path.name for path in folder.glob("mp_rank_*") if _RANK_FOLDER.match(path.name))


def _time_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that every rank stores alike (`generate_state_dict`): iteration, scheduler and job.

    Other arguments (`rank`, `local_rank`) differ between ranks.
    """
    schedulers = [(key, state.get(key)) for key in SCHEDULERS]
    return (
        {key: state.get(key) for key in _ITERATIONS}
        | {
            f"{key}.{escape(str(name))}": value
            for key, scheduler in schedulers
            if isinstance(scheduler, dict)
            for name, value in scheduler.items()
        }
        | {f"args.{name}": getattr(state.get("args"), name, None) for name in FIELDS}
    )


def is_model_chunk(key: object) -> bool:
    """Return whether a key of a rank's state is that of a model chunk."""
    return bool(_MODEL_CHUNK.match(str(key)))
