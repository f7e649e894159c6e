"""Writes `torch_dist` with the optimizer in natural shapes, which stock resumes under any layout.

Sources: `save_checkpoint` (megatron/training/checkpointing.py) and `_save` of megatron/core/dist_checkpointing
(serialization.py, strategies/torch.py), core_v0.8.0 to 0.19.2.
Since 0.15 the optimizer is `fully_reshardable`; before, `fully_sharded_model_space`, whose arrays are stored as
[shards along each axis, elements of a shard] (strategies/resharding.py). This package writes one shard for each index
on the stacked axes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from math import prod
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.formats.distcp_files import Array, Chunk, DistcpFiles
from mcore_ckpt_ext.formats.laid_out import OutputPlan, check_iteration, iteration, small_file, with_files, with_notes
from mcore_ckpt_ext.formats.portable_state import (
    SHARDING_MARK,
    WRITTEN_FOR,
    PortableState,
    distinct_groups,
    known_arguments,
)
from mcore_ckpt_ext.formats.target import version_number
from mcore_ckpt_ext.formats.torch_dist.bridge_files import run_config_file, train_state
from mcore_ckpt_ext.formats.torch_dist.chained_optimizers import ChainedOptimizers
from mcore_ckpt_ext.formats.torch_dist.options import TorchDist
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.views import with_layer_form
from mcore_ckpt_ext.formats.vocabulary import vocabulary_contradiction, vocabulary_rows
from mcore_ckpt_ext.job.assignments import parse_assignments
from mcore_ckpt_ext.job.layer_form import note_on
from mcore_ckpt_ext.job.loops.bridge import LATEST_TRAIN_STATE, RUN_CONFIG, TRAIN_STATE
from mcore_ckpt_ext.job.releases import (
    DESCRIBES_CONTENT,
    EXTENDS_INDEX_WITH_SHAPES,
    GRID_OF_EXPERTS_HAS_DATA_RANKS,
    LOADS_PORTABLE_OPTIMIZERS,
    MARKS_CHAINED_KEYS,
    RESHAPES_STATE,
    RESHAPES_STATE_OF_ONE_AXIS,
    STORES_COMMON_STATE_AS_OBJECT,
    STORES_FULLY_RESHARDABLE,
)
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.anatomy import block_of, leaves_out_state
from mcore_ckpt_ext.model_space.names import EXTRA_STATE, is_of_experts, parse
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT, LogicalTensor
from mcore_ckpt_ext.optimizers.table import portable_format
from mcore_ckpt_ext.planning.plan import ITEM_SIZE, TargetSlice, named_tensor
from mcore_ckpt_ext.planning.write_plan import Output, OutputFile
from mcore_ckpt_ext.storage.archive_writer import plan_archive

# A rank that needs part of a chunk reads all of it (torch/distributed/checkpoint/filesystem.py), so chunks are small.
CHUNK_BYTES = 128 << 20
_FLOATS = {"float64", "float32", "float16", "bfloat16"}
_COMPARED = ("num_layers", "hidden_size", "num_attention_heads")
_LAST_NORM = re.compile(r"decoder\.final_(layer)?norm\.weight")


class TorchDistTarget:
    """Lays out one iteration folder.

    `has_expert_optimizer`: whether experts have an optimizer of their own, as in jobs with expert parallelism.
    """

    def __init__(
        self,
        checkpoint: CheckpointView,
        version: tuple[int, int],
        has_expert_optimizer: bool,
        *,
        with_arguments: bool = True,
    ) -> None:
        """Choose the optimizer format of that version; `with_arguments`: write Megatron's arguments.

        Raises:
            UnsupportedCheckpointError: that version has no optimizer format that it resumes under any layout.
        """
        if not LOADS_PORTABLE_OPTIMIZERS.is_of(version):
            raise UnsupportedCheckpointError(
                "that version of Megatron has no torch_dist optimizer format that it resumes under another layout",
                found=f"--megatron-version {version[0]}.{version[1]}",
                expected=f"{LOADS_PORTABLE_OPTIMIZERS.since} or later",
                hint="use --to legacy with the layout that you will resume with",
            )
        self._checkpoint = checkpoint
        self._version = version
        self._has_expert_optimizer = has_expert_optimizer
        self._with_arguments = with_arguments
        self._keys = checkpoint.model.sharded_keys()
        self._state = PortableState.of(checkpoint, known_arguments(checkpoint.job.arguments()), version)
        self._chain = ChainedOptimizers(checkpoint, version, has_expert_optimizer=has_expert_optimizer)
        self._random_states = dict(self._random_state_objects())

    @property
    def carries_random_states(self) -> bool:
        """True if the states of the random generators are written."""
        return bool(self._random_states)

    def output(self) -> Output:
        """Plan all files of the folder, and the location of each tensor."""
        writer = DistcpFiles()
        objects = dict(self._objects())
        common = self._common(objects)
        small: list[OutputFile] = []
        if STORES_COMMON_STATE_AS_OBJECT.is_of(self._version):
            objects["common_state/shard_0_1"] = common
        else:
            archive = plan_archive(common)
            small.append(OutputFile("common.pt", archive.length, archive.literals))
        for key, value in objects.items():
            writer.add_object(key, value)
        for array in self._arrays():
            writer.add_array(array)
        files, records, metadata = writer.finish(with_shapes=EXTENDS_INDEX_WITH_SHAPES.is_of(self._version))
        small.append(small_file(".metadata", metadata))
        small.append(small_file("metadata.json", self._config(), last=True))
        afresh = "the state of the random generators is not converted: they are reinitialized on resuming"
        notes = [*self._state.notes, *(() if self._random_states else (afresh,))]
        return Output([*files, *small], records, (*notes, *self._chain.notes(), *self._about_the_arguments()))

    def _about_the_arguments(self) -> Iterator[str]:
        """Report missing arguments that stock requires and compares (`check_checkpoint_args`, 0.7 to 0.19)."""
        missing = [name for name in _COMPARED if not self._checkpoint.job.arguments().is_set(name)]
        if missing and self._with_arguments and not self._checkpoint.job.is_release:
            yield f"{' and '.join(missing)} of the job, which stock Megatron requires, is unknown"

    def _config(self) -> bytes:
        """Return `CheckpointingConfig` (dist_checkpointing/core.py); since 0.19 it has no common backend."""
        config: dict[str, Any] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        if not STORES_COMMON_STATE_AS_OBJECT.is_of(self._version):
            config |= {"common_backend": "torch", "common_backend_version": 1}
        return json.dumps(config).encode()

    def _arrays(self) -> Iterator[Array]:
        source = self._checkpoint
        yield from self._arrays_of(WEIGHT, source.model.weights().names(), "")
        if source.optimizer.format() is None:
            return
        optimizer = source.optimizer.state()
        for kind in optimizer.carried_kinds:
            for distributed in (True, False):
                names = [name for name in optimizer.names(kind) if self._chain.is_distributed(name) == distributed]
                if kind == FP32_PARAM and not distributed:
                    names = [name for name in names if named_tensor(self._checkpoint, WEIGHT, name).dtype != "float32"]
                renamed = STORES_FULLY_RESHARDABLE.is_of(self._version)
                gathered = kind == FP32_PARAM and distributed and renamed
                state = "param" if gathered else kind
                yield from self._arrays_of(kind, names, f"optimizer.state.{state}.", distributed)

    def _arrays_of(self, kind: str, names: Sequence[str], prefix: str, distributed: bool = False) -> Iterator[Array]:
        """Yield one kind's arrays, stacking equal keys; `distributed`: those of a DistributedOptimizer."""
        stacks: dict[str, list[tuple[tuple[int, ...], str]]] = {}
        for name in names:
            key, index = self._keys[name]
            stacks.setdefault(key, []).append((index, name))
        for key, members in stacks.items():
            tensors = [named_tensor(self._checkpoint, kind, name) for _, name in members]
            counts = tuple(max(axis) + 1 for axis in zip(*(index for index, _ in members), strict=True))
            shape = tensors[0].shape
            dtype = _common_dtype(tensors)
            whole = counts + shape
            reshaped = distributed and self._reshapes(whole)
            cut = _flat_chunk if reshaped else _chunks
            parts = zip(members, tensors, strict=True)
            chunks = tuple(chunk for (index, _), tensor in parts for chunk in cut(kind, index, tensor))
            name = self._child_prefix(kind, key) + prefix + key
            if reshaped:
                stored = counts + (1,) * len(shape) + (prod(shape),)
                yield Array(name, stored, dtype, chunks, whole)
            else:
                yield Array(name, whole, dtype, chunks)

    def _reshapes(self, shape: tuple[int, ...]) -> bool:
        """Return whether that version stores an optimizer array of this shape reshaped (1-D: since 0.11)."""
        row = RESHAPES_STATE if len(shape) > 1 else RESHAPES_STATE_OF_ONE_AXIS
        return row.is_of(self._version)

    def _child_prefix(self, kind: str, key: str) -> str:
        """Return the prefix of a chained optimizer's keys in 0.8 to 0.13.

        Source: `ChainedOptimizer.sharded_state_dict`.
        """
        if kind == WEIGHT or not self._has_expert_optimizer or not MARKS_CHAINED_KEYS.is_of(self._version):
            return ""
        return f"chained_{int(is_of_experts(key))}."

    def _objects(self) -> Iterator[tuple[str, Any]]:
        """Yield pickled objects by key: extra states, and random states if the reading job has equal ranks."""
        counts: dict[str, tuple[int, ...]] = {}
        # Experts are always stacked, so an additional axis shows that the layers of a block are stacked, too.
        stacked = {block_of(key) for key, index in self._keys.values() if len(index) > is_of_experts(key)}
        states: list[tuple[str, tuple[int, ...], Any]] = []
        for name, value in {**self._final_norm_states(), **self._state.extra_states}.items():
            parsed = parse(name)
            key, index = parsed.sharded_key(parsed.block in stacked)
            if not leaves_out_state(key, self._keys):
                states.append((key, index or (0,), value))
                counts[key] = tuple(map(max, counts.get(key, states[-1][1]), states[-1][1]))
        for key, index, value in states:
            yield f"{key}/shard_{_join_dots(index)}_{_join_dots([count + 1 for count in counts[key]])}", value
        yield from self._random_states.items()

    def _final_norm_states(self) -> dict[str, Any]:
        """Return empty extra states of the final norms for a release checkpoint in the local layer spec.

        If Transformer Engine is installed, the final norms are modules of it, and request these states
        (`LayerNormImpl`, transformer_block.py, core_v0.12.1 to 0.19.2). Otherwise no module requests them.
        """
        if not (self._checkpoint.job.is_release and self._checkpoint.job.arguments().transformer_impl == "local"):
            return {}
        modules = [name.removesuffix(".weight") for name in self._keys if _LAST_NORM.fullmatch(name)]
        return {f"{module}.{EXTRA_STATE}": torch.empty(0, dtype=torch.uint8) for module in modules}

    def _random_state_objects(self) -> Iterator[tuple[str, Any]]:
        """Yield the states of the random generators by key; none if the reading job has different ranks."""
        states = self._state.random_states
        grid = tuple(max(axis) + 1 for axis in zip(*states, strict=True)) if states else ()
        layout = self._checkpoint.job.layout
        # In 0.16 with several expert ranks, and only there, the grid has a data-parallel axis (`get_rng_state`).
        axes = 3 if GRID_OF_EXPERTS_HAS_DATA_RANKS.is_of(self._version) and layout.expert > 1 else 2
        if len(grid) == axes and len(states) == prod(grid):
            for place, value in states.items():
                yield f"rng_state/shard_{_join_dots(place)}_{_join_dots(grid)}", value

    def _common(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Return the common state as that version's `save_checkpoint` writes it."""
        source = self._checkpoint
        common = dict(self._state.common)
        common["args"] = arguments = argparse.Namespace(**vars(self._state.common["args"]))
        if vocabulary_contradiction(source):
            arguments.padded_vocab_size = vocabulary_rows(source)
        arguments.ckpt_format = "torch_dist"
        arguments.use_dist_ckpt = True
        arguments.no_save_rng = not any(key.startswith("rng_state/") for key in objects)
        content: dict[str, Any] = {}
        if source.optimizer.format() is not None:
            encoding = portable_format(self._version)
            children = self._chain.entries(encoding) or self._distributed_entries(encoding)
            common["optimizer"] = dict(enumerate(children)) if len(children) > 1 else children[0]
            if any(SHARDING_MARK in child for child in children):
                content["distrib_optim_sharding_type"] = encoding
            arguments.use_distributed_optimizer = all(SHARDING_MARK in child for child in children)
            arguments.ckpt_fully_parallel_save = True  # up to 0.12 this selects `fully_sharded_model_space`
        if DESCRIBES_CONTENT.is_of(self._version):
            written = source.job.common().get("content_metadata")
            singletons = written.get("singleton_local_shards") if isinstance(written, dict) else None
            content["singleton_local_shards"] = singletons is True
            content["chained_optim_avoid_prefix"] = not MARKS_CHAINED_KEYS.is_of(self._version)
            if STORES_FULLY_RESHARDABLE.is_of(self._version):
                content["distrib_optim_fully_reshardable_mem_efficient"] = False
            common["content_metadata"] = content
        if not self._with_arguments:
            common[WRITTEN_FOR] = getattr(common.pop("args"), WRITTEN_FOR)
        return common

    def _distributed_entries(self, encoding: str) -> list[dict[str, Any]]:
        """Return an entry for each distributed optimizer: dense parameters, then experts."""
        children = []
        for groups in distinct_groups(self._checkpoint.optimizer.param_groups(), self._has_expert_optimizer):
            child: dict[str, Any] = {"optimizer": {"param_groups": groups}, SHARDING_MARK: encoding}
            scaler = self._checkpoint.optimizer.grad_scaler()
            if scaler is not None:
                child["grad_scaler"] = scaler
            children.append(child)
        return children


def _chunks(kind: str, index: tuple[int, ...], tensor: LogicalTensor) -> Iterator[Chunk]:
    """Yield a tensor in chunks of limited size, split along its first axis."""
    shape = tensor.shape
    rows = shape[0] if shape else 1
    row_bytes = max(1, prod(shape[1:]) * ITEM_SIZE[tensor.dtype])
    step = max(1, CHUNK_BYTES // row_bytes)
    for first in range(0, max(rows, 1), step):
        sizes = (min(step, rows - first), *shape[1:]) if shape else ()
        offsets = (first, *(0 for _ in shape[1:])) if shape else ()
        region = Region(tensor.name, offsets, sizes)
        target_slice = TargetSlice(kind, Slice.whole((region,)), {tensor.name: tensor})
        yield Chunk(index + offsets, (1,) * len(index) + sizes, target_slice)


def _common_dtype(tensors: Sequence[LogicalTensor]) -> str:
    """Return the dtype that rounds none of the tensors, since layers of one array may differ.

    Raises:
        UnsupportedCheckpointError: there is none, because some tensors are numbers and others are quantized.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1:
        return tensors[0].dtype
    if not dtypes <= _FLOATS:
        raise UnsupportedCheckpointError(
            "Megatron stores layers of different dtypes in one array",
            found=" and ".join(sorted(dtypes)),
            expected="floating-point numbers of 16 bits and more",
            where=tensors[0].name,
            hint="use --to canonical, which keeps their dtypes",
        )
    return str(reduce(torch.promote_types, (getattr(torch, dtype) for dtype in dtypes))).removeprefix("torch.")


def _flat_chunk(kind: str, index: tuple[int, ...], tensor: LogicalTensor) -> Iterator[Chunk]:
    """Yield a tensor as one shard of the reshaped array."""
    region = Region.whole(tensor.name, tensor.shape)
    target_slice = TargetSlice(kind, Slice.whole((region,)), {tensor.name: tensor})
    axes = len(index) + len(tensor.shape)
    offsets = index + (0,) * (len(tensor.shape) + 1)
    yield Chunk(offsets, (1,) * axes + (region.numel,), target_slice)


def _join_dots(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


def lay_out(checkpoint: CheckpointView, target: TorchDist, family: Family | None) -> OutputPlan:
    """Lay out a run folder with one iteration, for Megatron's own loop or for Megatron-Bridge.

    Raises:
        UnsupportedCheckpointError: the format, or that version, cannot hold this checkpoint.
    """
    check_iteration(checkpoint, target)
    changes = parse_assignments(target.arguments)
    checkpoint = with_layer_form(checkpoint, changes)
    version = version_number(target.megatron_version)
    expert = target.expert_model_parallel_size
    has_expert_optimizer = checkpoint.optimizer.has_expert_optimizer() if expert is None else expert > 1
    written = TorchDistTarget(checkpoint, version, has_expert_optimizer, with_arguments=not target.is_for_bridge)
    of_bridge = checkpoint.format.bridge_notices() if target.is_for_bridge else []
    output = with_notes(written.output(), [*note_on(changes), *of_bridge])
    if (stored_config := checkpoint.format.run_config()) is not None:
        output = with_files(output, small_file(RUN_CONFIG, stored_config.encode()))
    elif target.is_for_bridge:
        run_config, notes = run_config_file(checkpoint, written.carries_random_states)
        output = with_notes(with_files(output, run_config, small_file(TRAIN_STATE, train_state(checkpoint))), notes)
    plan = iteration(checkpoint, target, output)
    if not target.is_for_bridge or checkpoint.job.is_release:
        return plan
    latest = small_file(LATEST_TRAIN_STATE, train_state(checkpoint), last=True)
    return replace(plan, output=replace(plan.output, files=[*plan.output.files, latest]))
