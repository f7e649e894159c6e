"""Lists the content of each file of a legacy checkpoint, from metadata alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from mcore_ckpt_ext.formats.stored_parts import StoredParts
from mcore_ckpt_ext.formats.unread_state import OTHER, tensors_in
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, STALE_MASTER, WEIGHT
from mcore_ckpt_ext.optimizers.flat_arrays import KINDS
from mcore_ckpt_ext.optimizers.stale_masters import are_stale_in_buffer


def parts_of_legacy(rank_files: Iterable[tuple[str, Any, Any]], arguments: JobArguments) -> Iterator[StoredParts]:
    """Yield the tensors in the pickles of all ranks; see `LegacyCheckpoint.rank_files`."""
    for file, _, content in rank_files:
        for path, nbytes in tensors_in(content, ()):
            yield StoredParts(_kind_of(path, arguments), ".".join(path), [(file, nbytes)])


def _kind_of(path: tuple[str, ...], arguments: JobArguments) -> str:
    kind = _kind_by_name(path)
    # In gathered buffers, the name of the kind is below the buffer's dtypes.
    is_stale = kind == FP32_PARAM and path[0].isdigit() and are_stale_in_buffer(arguments, path[-2])
    return STALE_MASTER if is_stale else kind


def _kind_by_name(path: tuple[str, ...]) -> str:
    if re.fullmatch(r"model\d*", path[0]):
        return WEIGHT
    if "fp32_from_fp16_params" in path:
        return FP32_PARAM
    if "grad_scaler" in path:
        return OTHER
    if path[0] == "optimizer" or path[0].isdigit():
        return KINDS.get(path[-1], path[-1])
    return OTHER
