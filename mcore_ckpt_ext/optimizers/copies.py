"""Masters of a tied embedding that differ between the pipeline stages that hold it.

With `--optimizer-cpu-offload` one stage may step its copy by torch's Adam and the other by FusedAdam, which do not
agree in every bit (seen with core_v0.16.1 to 0.19.2). That is how the job was: the first stage's copy is taken, and the
user is told.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mcore_ckpt_ext.model_space.names import WORD_EMBEDDINGS
from mcore_ckpt_ext.model_space.slices import Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, LogicalTensor
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.planning.plan import OneCopy, StoredSlice
from mcore_ckpt_ext.transfer import Transfer, read_slice

_BLOCK = 1 << 22


def differing_masters(state: OptimizerState, transfer: Transfer, share: tuple[int, int] = (0, 1)) -> int:
    """How many masters of the word embeddings are not the same in every bit of all copies.

    Args:
        state: the optimizer's.
        transfer: reads its files.
        share: which part of the work this is: its number, and how many there are.
    """
    tensor = state.logical_tensor(FP32_PARAM, WORD_EMBEDDINGS)
    if tensor is None:
        return 0
    found, number = 0, 0
    for first, *others in state.copies(FP32_PARAM, WORD_EMBEDDINGS):
        regions = tuple(dict.fromkeys(region for stored in first for region in stored.slice.regions))
        end = sum(region.numel for region in regions)
        for begin in range(0, end if others else 0, _BLOCK):
            number += 1
            if number % share[1] != share[0]:
                continue
            wanted = Slice(regions, begin, min(begin + _BLOCK, end))
            one, *more = (_read(tensor, copy, transfer, wanted) for copy in (first, *others))
            found += sum(int((one != other).sum()) for other in more)
    return found


def in_words(count: int) -> str:
    """What whoever goes on from there should know."""
    return (
        f"{count:,} masters of the tied word embeddings differ between pipeline stages, as --optimizer-cpu-offload may "
        "leave them: those of the first stage are taken"
    )


def _read(tensor: LogicalTensor, copy: Sequence[StoredSlice], transfer: Transfer, wanted: Slice) -> torch.Tensor:
    return read_slice(OneCopy(tensor, copy), transfer, FP32_PARAM, wanted).view(torch.int32)
