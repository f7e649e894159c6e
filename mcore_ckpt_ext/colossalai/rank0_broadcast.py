"""Sends the values of rank 0 of a ZeRO group to ranks that pass none.

``state_dict()`` returns everything on rank 0 and an empty dict on the others. If the ranks pass these dicts to
``load_state_dict``, the others receive rank 0's outline first (shapes, dtypes, and everything that is no tensor), then
one tensor at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mcore_ckpt_ext.collectives import gather
from mcore_ckpt_ext.colossalai.ranks import GroupErrors
from mcore_ckpt_ext.colossalai.state_digest import Digests, digests, same_digests
from mcore_ckpt_ext.colossalai.tensor_parallel import as_bytes
from mcore_ckpt_ext.colossalai.wrapper import Wrapped
from mcore_ckpt_ext.errors import ResumeRefusedError, format_ranks
from mcore_ckpt_ext.group_device import payload_device


class Agreed(NamedTuple):
    """The content that the ranks load.

    Args:
        outline: this rank's own content; or, if some rank has none, that of rank 0 of the ZeRO group: on that rank with
            its values, on others with tensors that only have shapes.
        comes_from_first: each tensor comes from rank 0 (`value_of_first`).
    """

    outline: Any
    comes_from_first: bool


def same_content(
    zero: Wrapped,
    call: str,
    arguments: Mapping[str, object],
    content: Mapping[Any, Any],
    is_full: bool,
    untouched: str,
    own: Container[str] = (),
) -> Agreed:
    """Make sure that all ranks pass equal content to the same call, or none, to receive that of rank 0.

    Args:
        zero: the wrapper.
        call: the call on this rank.
        arguments: arguments that must be equal on all ranks.
        content: nested dicts and lists with tensors.
        is_full: True if this rank passes content.
        untouched: the state in which a refusal leaves the job.
        own: entries whose values may differ between ranks.

    Raises:
        ResumeRefusedError: on all ranks.
    """

    def inspect_here() -> tuple[Digests | None, bool]:
        local_digests = digests(content, own)
        return local_digests if is_full else None, zero.is_first

    inspected = same_digests(zero.ranks, call, arguments, inspect_here, untouched)
    if len({digest is None for digest, _ in inspected.values()}) == 1:
        return Agreed(content, comes_from_first=False)
    lacking = [rank for rank, (digest, is_first) in inspected.items() if is_first and digest is None]
    if lacking:
        raise ResumeRefusedError(
            f"calling {call}; {untouched}",
            found=f"nothing on rank {format_ranks(lacking)}, rank 0 of a ZeRO group",
            expected="the whole state dict on every rank, or on rank 0 of every ZeRO group and an empty one elsewhere",
        )
    outline = _outline_of_first(zero, content)
    return Agreed(content if zero.is_first else outline, comes_from_first=True)


def value_of_first(zero: Wrapped, value: torch.Tensor, errors: GroupErrors) -> torch.Tensor:
    """Receive a tensor from rank 0 of the group; the others pass its outline, and all must call this.

    Raises:
        ResumeRefusedError: on all ranks, if a rank has failed since they last met, or has no memory for the tensor.
    """

    def sent_or_received() -> torch.Tensor:
        made = torch.empty(value.shape, dtype=value.dtype, device=payload_device(zero.group))
        return made.copy_(value.detach()) if zero.is_first else made

    sent: torch.Tensor = errors.attempt(sent_or_received)  # type: ignore[assignment]  # no rank has failed
    errors.raise_on_all()
    dist.broadcast(as_bytes(sent), src=zero.first_rank, group=zero.group)
    return sent


def _outline_of_first(zero: Wrapped, content: Any) -> Any:
    """Return the content of rank 0 of the group, with tensors without data; all its ranks must call this.

    Extra state is sent as it is.
    """
    local_content = (_strip_data(dict(content)), getattr(content, "_metadata", None)) if zero.is_first else None
    items, metadata = gather(local_content, zero.group)[0]  # type: ignore[misc]  # rank 0 has one
    outline = OrderedDict(items)
    if metadata is not None:
        vars(outline)["_metadata"] = metadata
    return outline


def _strip_data(content: Any) -> Any:
    if isinstance(content, torch.Tensor):
        return torch.empty(content.shape, dtype=content.dtype, device="meta")
    if isinstance(content, dict):
        return {
            key: value if str(key).endswith("_extra_state") else _strip_data(value) for key, value in content.items()
        }
    return content
