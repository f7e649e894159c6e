"""Checks that all ranks have the same content: keys, shapes, dtypes and digests of the tensors.

Digesting all bytes would take a fifth of the time of the load itself or more, even if a rank maps a file and needs only
its own part. So if the content exceeds `_WHOLE_BYTES`, only samples of each larger tensor are digested, spread evenly
from its first to its last byte: checkpoints of different iterations differ in nearly every element.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, TypeVar

import torch

from mcore_ckpt_ext.colossalai.ranks import Ranks
from mcore_ckpt_ext.errors import CheckpointError, ResumeRefusedError, format_ranks, join_some
from mcore_ckpt_ext.storage.crc32 import crc32

_WHOLE_BYTES = 16 << 20
_SAMPLES = 16
_SAMPLE_BYTES = 4 << 10

Digests = dict[str, str]
Result = TypeVar("Result")


def digests(content: Mapping[Any, object], own: Container[str] = ()) -> Digests:
    """Return a digest of every leaf of nested dicts and lists, by its path.

    Args:
        content: nested dicts and lists.
        own: entries whose values may differ between ranks (such as a BatchNorm's statistics): only their shapes count.

    Raises:
        CheckpointError: a tensor has no values to copy: it is on the meta device, sparse or quantized.
    """
    leaves = {key: dict(_leaves(value, str(key))) for key, value in content.items()}
    tensors = [leaf for some in leaves.values() for leaf in some.values() if isinstance(leaf, torch.Tensor)]
    whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= _WHOLE_BYTES
    return {
        path: _form(path, leaf) if key in own else _digest(path, leaf, whole)
        for key, some in leaves.items()
        for path, leaf in some.items()
    }


def same_digests(
    ranks: Ranks,
    call: str,
    arguments: Mapping[str, object],
    inspect_here: Callable[[], tuple[Digests | None, Result]],
    untouched: str,
) -> dict[int, tuple[str | None, Result]]:
    """Do what `Ranks.same_call` does, and make sure that all ranks with content have the same.

    `inspect_here` returns the digests of this rank's content, or None if it has none, and a result.

    Returns:
        By rank, one digest of everything, or None, and the result.

    Raises:
        ResumeRefusedError: on all ranks; if contents differ, it says which entries do.
    """
    local: Digests = {}

    def summarize() -> tuple[str | None, Result]:
        content, result = inspect_here()
        local.update(content or {})
        return None if content is None else _summary(content), result

    inspected = ranks.same_call(call, arguments, summarize, untouched)
    if len({digest for digest, _ in inspected.values() if digest is not None}) > 1:
        by_rank = {rank: held for rank, held in ranks.items_by_rank(local).items() if inspected[rank][0] is not None}
        raise _refusal(by_rank, untouched)
    return inspected


def _summary(content: Digests) -> str:
    """Return one digest of everything, independent of the order of the keys."""
    lines = "\n".join(f"{path}\0{digest}" for path, digest in sorted(content.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _refusal(by_rank: Mapping[int, Digests], untouched: str) -> ResumeRefusedError:
    paths = sorted({path for rank_digests in by_rank.values() for path in rank_digests})
    differing = [path for path in paths if len({rank_digests.get(path) for rank_digests in by_rank.values()}) > 1]
    return ResumeRefusedError(
        f"the ranks pass different contents; {untouched}",
        found=_sides(by_rank, differing[0]),
        expected="the same keys and values on every rank",
        where=join_some(differing, 3),
        hint="load the same files on every rank (a stale copy on a local disk?), or give the whole dict to rank 0 of "
        "the ZeRO group and an empty one to the others",
    )


def _sides(by_rank: Mapping[int, Digests], path: str) -> str:
    """Group the ranks by their digest of one entry, in words."""
    sides: dict[str | None, list[int]] = {}
    for rank, rank_digests in by_rank.items():
        sides.setdefault(rank_digests.get(path), []).append(rank)
    return "; ".join(
        f"rank {format_ranks(ranks)}: {'no such entry' if digest is None else digest}"
        for digest, ranks in sides.items()
    )


def _leaves(content: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _leaves(value, f"{path}/{key}")
    elif isinstance(content, (list, tuple)):
        for place, value in enumerate(content):
            yield from _leaves(value, f"{path}/{place}")
    else:
        yield path, content


def _digest(path: str, leaf: object, whole: bool) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{_form(path, leaf)} {_checksum(leaf, whole):08x}"
    if isinstance(leaf, io.BytesIO):
        return f"{crc32(leaf.getbuffer()):08x}"
    plain = isinstance(leaf, (bool, int, float, str, bytes)) or leaf is None
    # Equality of other objects between processes cannot be determined.
    return repr(leaf) if plain else _form(path, leaf)


def _form(path: str, leaf: object) -> str:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__qualname__
    _refuse_without_values(path, leaf)
    return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"


def _refuse_without_values(path: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise CheckpointError(
            "a tensor of the dict cannot be copied into a parameter",
            found=f"a {kind} tensor of shape {tuple(tensor.shape)}",
            expected="a dense tensor with values",
            where=path,
            hint="materialize it: to_dense(), dequantize(), or load the file without the meta device",
        )


def _checksum(tensor: torch.Tensor, whole: bool) -> int:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    last = len(flat) - _SAMPLE_BYTES
    if not whole and len(flat) > _SAMPLES * _SAMPLE_BYTES:
        starts = [last * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)]
        flat = torch.cat([flat[start : start + _SAMPLE_BYTES] for start in starts])
    return crc32(flat.cpu().numpy())
