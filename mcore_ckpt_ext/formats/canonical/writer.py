"""Writes the format `canonical`; the reader documents the files."""

from __future__ import annotations

from math import prod
from typing import Any

from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.formats.adapter_order import about_order
from mcore_ckpt_ext.formats.canonical.options import Canonical
from mcore_ckpt_ext.formats.canonical.reader import (
    CHECKSUM_BYTES,
    CHECKSUMS,
    COMMON_FILE,
    INDEX_FILE,
    MARK,
    NAME,
    VERSION,
)
from mcore_ckpt_ext.formats.description import ARGUMENTS
from mcore_ckpt_ext.formats.laid_out import OutputPlan, with_notes
from mcore_ckpt_ext.formats.portable_state import known_arguments
from mcore_ckpt_ext.formats.view import CheckpointView, carried_kinds
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.planning.plan import ITEM_SIZE, TargetSlice, named_tensor
from mcore_ckpt_ext.planning.write_plan import Output, OutputFile, Record, WriteItem
from mcore_ckpt_ext.storage.json_text import json_file
from mcore_ckpt_ext.storage.json_tree import encode
from mcore_ckpt_ext.storage.safetensors import Declared, lay_out_file

FILE_BYTES = 4 << 30


def lay_out(checkpoint: CheckpointView, target: Canonical, family: Family | None) -> OutputPlan:
    """Lay out a folder."""
    notices = [*checkpoint.format.notices(checkpoint), *about_order(checkpoint)]
    return OutputPlan(with_notes(_output(checkpoint), notices), "", carried_kinds(checkpoint))


def _output(checkpoint: CheckpointView) -> Output:
    """Plan all files, and the location of each tensor."""
    batches: list[list[tuple[str, LogicalTensor]]] = [[]]
    size = 0
    for kind in carried_kinds(checkpoint):
        for name in checkpoint.names(kind):
            tensor = named_tensor(checkpoint, kind, name)
            nbytes = prod(tensor.shape) * ITEM_SIZE[tensor.dtype]
            if batches[-1] and size + nbytes > FILE_BYTES:
                batches.append([])
                size = 0
            batches[-1].append((kind, tensor))
            size += nbytes
    files: list[OutputFile] = []
    records: list[Record] = []
    weight_map: dict[str, str] = {}
    for number, batch in enumerate(batches, 1):
        name = f"{NAME}-{number:05d}-of-{len(batches):05d}.safetensors"
        arrays = [Declared(f"{kind}.{tensor.name}", tensor.shape, tensor.dtype) for kind, tensor in batch]
        checksums = Declared(CHECKSUMS, (len(arrays),), "int32")
        file, (*starts, first_checksum) = lay_out_file(name, [*arrays, checksums])
        files.append(file)
        place_of = {key: first_checksum + CHECKSUM_BYTES * at for at, key in enumerate(sorted(a.key for a in arrays))}
        for (kind, tensor), array, start in zip(batch, arrays, starts, strict=True):
            part = Slice.whole((Region.whole(tensor.name, tensor.shape),))
            write_items = (WriteItem(0, TargetSlice(kind, part, {tensor.name: tensor})),)
            checksum = (place_of[array.key],)
            records.append(Record(file.name, start, tensor.dtype, part.numel, write_items, checksum))
        weight_map |= {array.key: file.name for array in arrays}
    total = sum(record.nbytes for record in records)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    files += [json_file(INDEX_FILE, index), json_file(COMMON_FILE, _about(checkpoint), last=True)]
    return Output(files, records)


def _common(checkpoint: CheckpointView) -> dict[str, Any]:
    return {key: value for key, value in checkpoint.job.common().items() if key != "optimizer"}


def _about(checkpoint: CheckpointView) -> dict[str, Any]:
    """Return everything except the arrays."""
    job = checkpoint.job
    optimizer = checkpoint.optimizer
    has_optimizer = optimizer.format() is not None
    state = optimizer.state() if has_optimizer else None
    undistributed = [name for name in state.names() if not state.is_distributed(name)] if state else []
    return {
        "format": MARK,
        "version": VERSION,
        "iteration": job.iteration(),
        "source": {
            "format": checkpoint.format.name,
            "optimizer_format": optimizer.format(),
            "layout": str(job.layout),
            "released": job.is_release,
        },
        "experts_apart": optimizer.has_expert_optimizer(),
        "sharded_keys": {name: [key, list(index)] for name, (key, index) in checkpoint.model.sharded_keys().items()},
        "param_groups": encode(optimizer.param_groups() if has_optimizer else []),
        "chain": encode(optimizer.chained_optimizer_settings() if has_optimizer else []),
        "undistributed": undistributed,
        "grad_scaler": encode(optimizer.grad_scaler() if has_optimizer else None),
        "extra_states": encode(dict(checkpoint.states.extra())),
        "random_states": [[list(place), encode(state)] for place, state in checkpoint.states.random().items()],
        "common": encode({**_common(checkpoint), ARGUMENTS: known_arguments(job.arguments())}),
    }
