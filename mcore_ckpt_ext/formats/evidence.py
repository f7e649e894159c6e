"""What files and keys show of the Megatron that wrote a checkpoint, and how Megatron's own loader takes each format.

Sources: megatron/core/dist_checkpointing and megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.formats.common_state import sharding_type
from mcore_ckpt_ext.optimizers.bucket_formats import DP_RESHARDABLE
from mcore_ckpt_ext.optimizers.model_space_formats import FULLY_RESHARDABLE
from mcore_ckpt_ext.storage.dcp_index import DcpIndex
from mcore_ckpt_ext.versions import NEWEST, OLDEST, Version

Bound = tuple[str, Version | None, Version | None]
"""What was seen, and the first and last release that it allows the writer to be; None where it says nothing."""


@dataclass(frozen=True)
class Loading:
    """How Megatron's own loader takes a format.

    Attributes:
        in_megatron: whether it reads it at all.
        flag: the flag of the jobs that it is for; empty where it is any job's.
        since: the first release that reads it.
        last: the last one, or the newest known.
        stumbles: why it fails all the same, under every layout; empty where it does not.
        by_rank: whether it finds files by the running layout, whatever lies in them.
    """

    in_megatron: bool = False
    flag: str = ""
    since: Version = OLDEST
    last: Version = NEWEST
    stumbles: str = ""
    by_rank: bool = False


def bounds_of_index(index: DcpIndex) -> Iterator[Bound]:
    """What the index of a `torch_dist` checkpoint shows."""
    if index.natural_shapes:
        yield ".metadata records natural shapes (mcore_data)", Version(0, 8), Version(0, 15)
    if index.has_plans:
        yield ".metadata keeps the plans of all ranks", Version(0, 11), None
    else:
        yield ".metadata keeps no plans of the ranks", None, Version(0, 10)


def bounds_of_metadata(common: Mapping[str, Any]) -> Iterator[Bound]:
    """What the content metadata in a common state show."""
    content = common.get("content_metadata")
    if not isinstance(content, dict):
        yield "no content metadata", None, Version(0, 12)
        return
    label = sharding_type(dict(common))
    if label in (DP_RESHARDABLE, FULLY_RESHARDABLE):
        yield f"the content metadata name the optimizer format {label}", Version(0, 15), None
    elif "singleton_local_shards" in content:
        yield "the content metadata have singleton_local_shards", Version(0, 14), None
    else:
        yield "the content metadata lack singleton_local_shards", Version(0, 13), Version(0, 13)
