"""The positions of parameters in a gradient buffer: Megatron's packing rules, by version.

The rules are pure arithmetic on the parameters in registration order. They were read in
`megatron/core/distributed/param_and_grad_buffer.py` (core_v0.7.0 to 0.17.0) and, from 0.18 on, in
`DistributedOptimizer._compute_per_buffer_param_layout` (megatron/core/optimizer/distrib_optimizer.py) with
`pad_param_start` and `pad_bucket_end` (megatron/core/optimizer/param_layout.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import lcm

PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
HIGH_BANDWIDTH_ALIGNMENT = 1 << 16


class PackingRule(Enum):
    """The padding before a parameter of the shared embedding, which gets its own bucket.

    `UNTIL_0_7`: parameters are not aligned; the open bucket is closed where the parameter starts. `UNTIL_0_8`:
    parameters are aligned (commit 5467bef3); otherwise the same. `UNTIL_0_12`: the open bucket is closed at a position
    that is padded to the bucket alignment if it is not a multiple of the data parallel size, and the parameter starts
    there (core_v0.9.0 to 0.12.x). `SINCE_0_13`: the bucket is closed at the parameter's aligned position, and the
    parameter starts at the padded end of that bucket (commit afb755f5, core_v0.13.0 to 0.19.2).
    """

    UNTIL_0_7 = "0.7"
    UNTIL_0_8 = "0.8"
    UNTIL_0_12 = "0.9 to 0.12"
    SINCE_0_13 = "0.13 and later"


@dataclass(frozen=True, slots=True)
class BufferParameter:
    """The properties of a parameter that packing depends on; `shared_embedding` is Megatron's attribute."""

    numel: int
    shared_embedding: bool = False


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket: buffer positions `[start, stop)` with padding at the end, and size without padding.

    `placements` lists (index of the parameter in registration order, first, last + 1), relative to the bucket.
    """

    start: int
    stop: int
    numel_unpadded: int
    placements: tuple[tuple[int, int, int], ...]


def bucket_alignment(data_parallel: int, high_bandwidth: bool) -> int:
    """Return the divisor of bucket ends; `high_bandwidth` is `--ddp-pad-buckets-for-high-nccl-busbw`."""
    base = lcm(data_parallel, BUCKET_ALIGNMENT)
    return lcm(base, HIGH_BANDWIDTH_ALIGNMENT) if high_bandwidth else base


def default_bucket_size(data_parallel: int) -> int:
    """Return the number of elements after which a bucket is closed if no argument sets it.

    Source: `get_model`, megatron/training/training.py.
    """
    return max(40_000_000, 1_000_000 * data_parallel)


def align(position: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is not below `position`."""
    return -(-position // alignment) * alignment


@dataclass
class _Packer:
    """The closed buckets, and the placements in the open one, which begins at `start`."""

    alignment: int
    buckets: list[Bucket] = field(default_factory=list)
    start: int = 0
    collected: list[tuple[int, int, int]] = field(default_factory=list)

    def close(self, end: int) -> int:
        """Close the open bucket at `end`, and return the start of the next one."""
        stop = align(end, self.alignment)
        placements = tuple((index, low - self.start, high - self.start) for index, low, high in self.collected)
        self.buckets.append(Bucket(self.start, stop, end - self.start, placements))
        self.start = stop
        self.collected = []
        return stop


def pack(
    parameters: Sequence[BufferParameter],
    *,
    bucket_size: int | None,
    data_parallel: int,
    rule: PackingRule = PackingRule.SINCE_0_13,
    high_bandwidth: bool = False,
) -> list[Bucket]:
    """Lay out the parameters of one buffer.

    Args:
        parameters: in registration order (`named_parameters()`); the buffer contains them in reverse.
        bucket_size: number of elements after which a bucket is closed; None for a single bucket.
        data_parallel: number of ranks that share the buffer (context-parallel ranks included).
        rule: the rule of the version.
        high_bandwidth: the same as in `bucket_alignment`.
    """
    packer = _Packer(bucket_alignment(data_parallel, high_bandwidth))
    cursor = end = 0
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        cursor = cursor if rule is PackingRule.UNTIL_0_7 else align(cursor, PARAMETER_ALIGNMENT)
        if parameter.shared_embedding:
            if rule is PackingRule.UNTIL_0_12 and cursor % data_parallel:
                cursor = align(cursor, packer.alignment)
            if packer.collected:
                stop = packer.close(cursor)
                cursor = stop if rule is PackingRule.SINCE_0_13 else cursor
        end = cursor + parameter.numel
        packer.collected.append((index, cursor, end))
        full = bucket_size is not None and end - packer.start >= bucket_size
        cursor = packer.close(end) if full or parameter.shared_embedding else end
    if packer.collected:
        packer.close(end)
    return packer.buckets
