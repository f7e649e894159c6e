"""Lists the content of each file of a legacy checkpoint, from metadata alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from mcore_ckpt_ext.formats.stored_parts import StoredParts
from mcore_ckpt_ext.formats.unread_state import OTHER, tensors_in
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.optimizers.flat_arrays import KINDS


def parts_of_legacy(rank_files: Iterable[tuple[str, Any, Any]]) -> Iterator[StoredParts]:
    """Yield the tensors in the pickles of all ranks; see `LegacyCheckpoint.rank_files`."""
    for file, _, content in rank_files:
        for path, nbytes in tensors_in(content, ()):
            yield StoredParts(_legacy_kind(path), ".".join(path), [(file, nbytes)])


def _legacy_kind(path: tuple[str, ...]) -> str:
    if re.fullmatch(r"model\d*", path[0]):
        return WEIGHT
    if "fp32_from_fp16_params" in path:
        return FP32_PARAM
    if "grad_scaler" in path:
        return OTHER
    if path[0] == "optimizer" or path[0].isdigit():
        return KINDS.get(path[-1], path[-1])
    return OTHER
