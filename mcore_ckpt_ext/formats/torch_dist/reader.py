"""Reads the format `torch_dist`: arrays in `.distcp` archives, everything else in the common state.
Source: `megatron/core/dist_checkpointing/strategies/torch.py` and `serialization.py` (core_v0.7.0 to 0.19.2).
The common state is `common.pt` up to 0.18, and the object `common_state` since 0.19.0 (commit 40b1fd37).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import INTERRUPTED, UnreadableCheckpointError
from mcore_ckpt_ext.formats.backend import is_finished
from mcore_ckpt_ext.formats.common_state import common_optimizers, sharding_type
from mcore_ckpt_ext.formats.evidence import Bound, Loading, bounds_of_index, bounds_of_metadata
from mcore_ckpt_ext.formats.holder import holder_of
from mcore_ckpt_ext.formats.parts import Files, Job, States, StoredOptimizer, StoredWeights, lazy
from mcore_ckpt_ext.formats.portable_state import has_experts, inner_state, once
from mcore_ckpt_ext.formats.reader import parts_of_tensors
from mcore_ckpt_ext.formats.stored_parts import StoredParts
from mcore_ckpt_ext.formats.torch_dist.described import DescribedCheckpoint
from mcore_ckpt_ext.formats.torch_dist.stacked_weights import StackedWeights
from mcore_ckpt_ext.formats.torch_dist.stored_parts import parts_of_torch_dist
from mcore_ckpt_ext.formats.unread_state import (
    COMMON_KEYS,
    RERUN_STATE,
    UNKNOWN,
    UnreadState,
    merge_entries,
    optimizer_kind,
    tensors_in,
    unread_common_state,
    unread_job_state,
)
from mcore_ckpt_ext.formats.view import CheckpointView, OpenedFormat
from mcore_ckpt_ext.job.releases import STORES_COMMON_STATE_AS_OBJECT
from mcore_ckpt_ext.model_space.names import is_extra_state, name_at, stacked_axes
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.optimizers.bucket_formats import optimizer_children
from mcore_ckpt_ext.optimizers.derived_masters import with_masters
from mcore_ckpt_ext.optimizers.groups import checked_groups, keeps_nothing
from mcore_ckpt_ext.optimizers.model_space_state import ModelSpaceState
from mcore_ckpt_ext.optimizers.optimizer_format import StoredKeys
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.optimizers.table import encodings_named, format_name, open_optimizer, recognize, unlabeled_format
from mcore_ckpt_ext.planning.array_location import RawArray
from mcore_ckpt_ext.storage.checked_files import is_stored
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex
from mcore_ckpt_ext.storage.index_entries import StoredObject
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

NAME = "torch_dist"
COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
_OPTIMIZER_PREFIXES = ("optimizer.", "chained_")
_STATE_OBJECTS = ".optimizer/shard_0_1"
_RANDOM_STATE = "rng_state/shard_"
_SCALER_OBJECTS = ".grad_scaler/shard_0_1"


class TorchDistCheckpoint(DescribedCheckpoint):
    """One iteration folder in `torch_dist`."""

    name = NAME

    @classmethod
    @override
    def recognizes(cls, stored: FolderIndex) -> bool:
        return is_finished(stored.folder, cls.name)

    @cached_property
    @override
    def format(self) -> OpenedFormat:
        return replace(super().format, loading=Loading(in_megatron=True))

    @cached_property
    @override
    def files(self) -> Files:
        return replace(super().files, archives=self._archives, stored_parts=self._stored_parts, unread=self._unread)

    @cached_property
    @override
    def model(self) -> StoredWeights:
        source = self._weights_source
        return replace(
            super().model, sharded_keys=source.model.sharded_keys if source else lambda: self._weights.places()
        )

    @cached_property
    @override
    def optimizer(self) -> StoredOptimizer:
        return StoredOptimizer(
            state=lazy(self._optimizer_state),
            format=lazy(self._optimizer_format),
            has_expert_optimizer=lazy(self._has_expert_optimizer),
            param_groups=self._param_groups,
            chained_optimizer_settings=self._chained_optimizer_settings,
            grad_scaler=self._grad_scaler,
        )

    @cached_property
    @override
    def job(self) -> Job:
        return replace(super().job, evidence=self._evidence)

    @cached_property
    @override
    def states(self) -> States:
        return States(self._extra_states, self._random_states, self._random_state_grid)

    def _stored_parts(self) -> Iterator[StoredParts]:
        yield from parts_of_torch_dist(self.index, lambda: self.optimizer.state().buffers, self.job.arguments())
        if self._weights_source is not None:
            yield from parts_of_tensors(self.view, [WEIGHT])

    def _evidence(self) -> Iterator[Bound]:
        yield from self._evidence_of_files()
        yield from bounds_of_metadata(self.job.common())

    def _evidence_of_files(self) -> Iterator[Bound]:
        if COMMON_OBJECT in self.index.objects:
            yield "the common state is an object of the checkpoint (common_state)", *STORES_COMMON_STATE_AS_OBJECT.span
        if is_stored(self.folder / COMMON_FILE):
            yield "the common state is a file of its own (common.pt)", *STORES_COMMON_STATE_AS_OBJECT.span_without
        yield from self._evidence_of_index()

    def _evidence_of_index(self) -> Iterator[Bound]:
        return bounds_of_index(self.index)

    @override
    def _read_index(self) -> DcpIndex:
        return self.folder_index.content

    @cached_property
    def _weights(self) -> StackedWeights:
        arrays = self.index.arrays
        return StackedWeights({k: a for k, a in arrays.items() if not k.startswith(_OPTIMIZER_PREFIXES)})

    @override
    def _read_common(self) -> dict[str, Any]:
        if is_stored(self.folder / COMMON_FILE):
            archive = TorchArchive(self.files.reader, COMMON_FILE)
            common = archive.with_values(archive.load())
        elif COMMON_OBJECT in self.index.objects:
            common = self._values(COMMON_OBJECT)
        else:
            raise UnreadableCheckpointError(
                "the checkpoint has no common state",
                expected=f"{COMMON_FILE}, or the object {COMMON_OBJECT}",
                where=str(self.folder),
                hint=INTERRUPTED,
            )
        if not isinstance(common, dict):
            kind = type(common).__name__
            raise UnreadableCheckpointError("the common state is not a dict", found=kind, where=str(self.folder))
        return common

    def _optimizer_format(self) -> str | None:
        """Return the optimizer format according to its keys, which take precedence over the common state."""
        return unlabeled_format() if self._keeps_nothing else format_name(self._optimizer_keys)

    @cached_property
    def _keeps_nothing(self) -> bool:
        """True if the optimizer is SGD without momentum in fp32, which stores parameter groups and no array."""
        groups = [group for child in self._common_optimizers() for group in inner_state(child)["param_groups"]]
        return keeps_nothing(groups) and not any(True for _ in self._optimizer_keys)

    @cached_property
    def _optimizer_keys(self) -> StoredKeys:
        """The stored optimizer state."""
        index = self.index
        label = sharding_type(self.job.common())
        return StoredKeys(
            index.arrays, index.objects, index.natural_shapes, index.chunks_show_parameters, label, self.object
        ).optimizer_keys()

    def _has_expert_optimizer(self) -> bool:
        """Return whether experts have a chained optimizer of their own, or groups of their own.

        Such an optimizer is in addition to those of dense parameters.
        """
        children = optimizer_children([*self.index.arrays, *self.index.objects])
        expected = 1 + bool(self.job.arguments().overlap_param_gather_with_optimizer_step)
        # Formats in model space do not number their optimizers, and keep all groups in the common state.
        return children > expected or has_experts(self._common_optimizers())

    def _optimizer_state(self) -> OptimizerState:
        if self._keeps_nothing:
            nothing = ModelSpaceState(self._optimizer_keys, distributed=False)
            return with_masters(nothing, self.model.weights(), lambda: self.job.models().weights)
        return open_optimizer(holder_of(self.view), self._optimizer_keys)

    def _unread(self, *, objects: bool = True) -> list[UnreadState]:
        within = self._unread_in_objects() if objects else ()
        return merge_entries([*self._unread_keys(), *unread_common_state(self.job.common(), COMMON_KEYS), *within])

    def _unread_keys(self) -> Iterator[UnreadState]:
        """Yield arrays and objects of the index that are not read."""
        claimed = {key for _, keys in recognize(self._optimizer_keys) for key in keys}
        for key, array in self.index.arrays.items():
            if key.startswith(_OPTIMIZER_PREFIXES) and key not in claimed:
                yield UnreadState(key, optimizer_kind(key), array.nbytes)
        for key, place in self.index.objects.items():
            if key.startswith(RERUN_STATE):
                yield unread_job_state(key.rpartition("/shard_")[0], place.length)
            elif key not in claimed and not _is_read(key):
                yield UnreadState(key, optimizer_kind(key), place.length)

    def _unread_in_objects(self) -> Iterator[UnreadState]:
        """Yield tensors in the small objects of optimizers, outside the parameter groups."""
        for key in self._keys(_STATE_OBJECTS):
            for path, nbytes in tensors_in(self.object(key), (key,)):
                if "param_groups" not in path:
                    yield UnreadState(".".join(path), UNKNOWN, nbytes)

    def object(self, key: str) -> Any:
        """Return a pickled object by its key.

        Raises:
            UnreadableCheckpointError: it is damaged.
        """
        return self._load_archived(self.index.objects[key], key)

    def _param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups as each rank group stored them, with repetitions.

        Flat formats store them in separate objects, model-space formats in the common state.
        """
        groups: list[dict[str, Any]] = []
        for key in self._keys(_STATE_OBJECTS):
            groups.extend(checked_groups(self._values(key)["param_groups"]))
        for child in self._common_optimizers():
            # In an fp32 job the entry is torch's own dict (`FP32Optimizer`, megatron/core/optimizer/optimizer.py).
            inner = child.get("optimizer") or child
            # torch's Adam stores a step for each parameter, all of them equal.
            step = (inner.get("state") or {}).get("common_step")
            counted = {} if step is None else {"step": int(step)}
            groups.extend({**counted, **group} for group in inner.get("param_groups", []))
        return groups

    def _chained_optimizer_settings(self) -> list[dict[str, Any]]:
        if all(encoding.distributed for encoding in encodings_named(self.optimizer.format())):
            return []
        children = []
        for number, child in enumerate(self._common_optimizers()):
            mark = f"chained_{number}."
            stored = [self._values(key)["param_groups"] for key in self._keys(_STATE_OBJECTS) if key.startswith(mark)]
            groups = [group for of_rank in stored for group in checked_groups(of_rank)]
            children.append({**child, "optimizer": {"param_groups": once(groups)}} if groups else child)
        return children

    def _grad_scaler(self) -> dict[str, Any] | None:
        for key in self._keys(_SCALER_OBJECTS):
            return dict(self._values(key))
        scalers = [child["grad_scaler"] for child in self._common_optimizers() if child.get("grad_scaler")]
        return dict(scalers[0]) if scalers else None

    def _common_optimizers(self) -> list[dict[Any, Any]]:
        """Return the optimizer's entries in the common state: one, or one for each chained optimizer."""
        return common_optimizers(self.job.common())

    def _random_state_grid(self) -> tuple[int, ...] | None:
        """Return the grid of ranks with stored random states: (PP, TP), in 0.16 with experts (PP, TP, DP)."""
        for key in self.index.objects:
            if key.startswith(_RANDOM_STATE):
                return tuple(int(size) for size in key.rpartition("_")[2].split("."))
        return None

    def _extra_states(self) -> Mapping[str, Any]:
        states = dict(self._weights_source.states.extra()) if self._weights_source else {}
        for key, _, shard in (name.rpartition("/shard_") for name in self.index.objects):
            if is_extra_state(key):
                offsets = [int(number) for number in shard.partition("_")[0].split(".")]
                value = self._values(f"{key}/shard_{shard}")
                states[name_at(key, offsets[: stacked_axes(key)])] = value
        return states

    def _random_states(self) -> Mapping[tuple[int, ...], Any]:
        states = {}
        for key in self.index.objects:
            if key.startswith(_RANDOM_STATE):
                place = key.removeprefix(_RANDOM_STATE).partition("_")[0]
                states[tuple(int(number) for number in place.split("."))] = self._values(key)
        return states

    def _archives(self) -> Iterator[tuple[str, int, int]]:
        for array in self._stored_index.arrays.values():
            for extent in (chunk.extent for chunk in array.chunks if not isinstance(chunk.extent, RawArray)):
                yield extent.file, extent.offset, extent.length
        for stored in self._stored_index.objects.values():
            yield stored.file, stored.offset, stored.length
        yield from self._external_archives()

    def _keys(self, suffix: str) -> list[str]:
        return sorted(k for k in self.index.objects if k.startswith(_OPTIMIZER_PREFIXES) and k.endswith(suffix))

    def _values(self, key: str) -> Any:
        """Read a small object and its tensors."""
        place = self.index.objects[key]
        return TorchArchive(self.files.reader, place.file, place.offset, place.length).with_values(self.object(key))

    def _load_archived(self, place: StoredObject, key: str) -> Any:
        archive = TorchArchive(self.files.reader, place.file, place.offset, place.length)
        return self._unwrap(archive.load(), f"{key}, {archive.where}")

    def _unwrap(self, loaded: Any, where: str) -> Any:
        """Return the object itself, which Megatron wraps in a list of one (strategies/torch.py)."""
        if not isinstance(loaded, list) or len(loaded) != 1:
            raise UnreadableCheckpointError(
                "a pickled object is not as Megatron writes it: it is damaged, or its metadata belongs to other files",
                where=where,
            )
        return loaded[0]


def torch_dist_reader(checkpoint: CheckpointView) -> TorchDistCheckpoint | None:
    """Return the reader of a checkpoint if Megatron's `torch_dist` loader reads it by the same index."""
    reader = checkpoint.format.reader
    # Formats with a derived reader have other keys, files or objects.
    return reader if type(reader) is TorchDistCheckpoint else None


def _is_read(key: str) -> bool:
    """Return whether an object that does not belong to an optimizer is read."""
    name, _, _ = key.rpartition("/shard_")
    return key == COMMON_OBJECT or key.startswith(_RANDOM_STATE) or is_extra_state(name)
