"""Compares the masters of a tied embedding on different pipeline stages.

With `--optimizer-cpu-offload` one stage may update its copy by torch's Adam and the other by FusedAdam, whose results
differ in some bits (seen with core_v0.16.1 to 0.19.2). The job itself had both values. The first stage's copy is used,
and the difference is reported.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.layout.master_check import bits_dtype
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.anatomy import word_embeddings_in
from mcore_ckpt_ext.model_space.slices import Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, LogicalTensor
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.plan import OneCopy, StoredSlice
from mcore_ckpt_ext.transfer import Transfer, read_slice

_BLOCK = 1 << 22


def differing_masters(state: OptimizerState, transfer: Transfer, share: tuple[int, int] = (0, 1)) -> int:
    """Return the number of masters of the word embeddings that differ in a bit between copies.

    Args:
        state: the optimizer's state.
        transfer: reads its files.
        share: the part of the work to do: its number, and the number of parts.
    """
    table = word_embeddings_in(state.names(FP32_PARAM))
    tensor = state.logical_tensor(FP32_PARAM, table) if table else None
    if table is None or tensor is None:
        return 0
    return sum(
        different_elements(tensor, FP32_PARAM, first, other, transfer, share)
        for first, *others in state.copies(FP32_PARAM, table)
        for other in others
    )


def different_elements(
    tensor: LogicalTensor,
    kind: str,
    one: Sequence[StoredSlice],
    other: Sequence[StoredSlice],
    transfer: Transfer,
    share: tuple[int, int] = (0, 1),
) -> int:
    """Return the number of elements that differ in a bit between two copies of a part of a tensor.

    Args:
        tensor: the tensor.
        kind: the kind of the tensor.
        one: the slices of a copy.
        other: the slices of another copy of the same part.
        transfer: reads the files.
        share: the blocks to compare: the number of this process, and the number of processes.
    """
    regions = tuple(dict.fromkeys(region for stored in one for region in stored.slice.regions))
    end = sum(stored.slice.numel for stored in one)
    differing = 0
    for number, begin in enumerate(range(0, end, _BLOCK)):
        if number % share[1] == share[0]:
            block = Slice(regions, begin, min(begin + _BLOCK, end))
            first, second = (bits_of(read_slice(OneCopy(tensor, copy), transfer, kind, block)) for copy in (one, other))
            differing += int((first != second).sum())
    return differing


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers of their size, which are equal if and only if all bits are."""
    return values.view(bits_dtype(values.element_size()))


def differing_masters_note(count: int) -> str:
    """Return a note for users who resume the checkpoint."""
    tied = "of the tied word embeddings"
    masters = quantity(count, f"master {tied} differs", f"masters {tied} differ")
    return (
        f"{masters} between pipeline stages, as --optimizer-cpu-offload may leave them: those of the first stage are "
        "taken"
    )
