"""Evidence of a checkpoint's Megatron release, and how Megatron's own loader handles each format.

Sources: megatron/core/dist_checkpointing and megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.formats.common_state import sharding_type
from mcore_ckpt_ext.job.releases import (
    DESCRIBES_CONTENT,
    DESCRIBES_LOCAL_SHARDS,
    EXTENDS_INDEX_WITH_SHAPES,
    KEEPS_PLANS_IN_INDEX,
    Capability,
    releases_between,
)
from mcore_ckpt_ext.optimizers.table import encodings_named
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex
from mcore_ckpt_ext.versions import Version

Bound = tuple[str, Version | None, Version | None]
"""An observation, and the first and last release that could have written it; None where there is no bound."""


@dataclass(frozen=True)
class Loading:
    """How Megatron's own loader handles a format.

    Attributes:
        in_megatron: whether it reads the format at all.
        flag: the flag that a job needs for it; empty if none.
        loaded_by: the releases that read it; None for all releases.
        failure: why it fails under every layout although it reads the format; empty if it does not fail.
        by_rank: whether it locates files by the running layout, whatever the files contain.
    """

    in_megatron: bool = False
    flag: str = ""
    loaded_by: Capability | None = None
    failure: str = ""
    by_rank: bool = False

    def releases(self, first: Version) -> list[Version]:
        """Return the known releases that read the format, from `first` on."""
        return list(filter(self.is_read_by, releases_between(first)))

    def is_read_by(self, version: Version) -> bool:
        """Return whether a release reads the format."""
        return self.in_megatron and (self.loaded_by is None or self.loaded_by.is_of(version))


def bounds_of_index(index: DcpIndex) -> Iterator[Bound]:
    """Yield the bounds that follow from the index of a `torch_dist` checkpoint."""
    if index.natural_shapes:
        yield ".metadata records natural shapes (mcore_data)", *EXTENDS_INDEX_WITH_SHAPES.span
    if index.has_plans:
        yield ".metadata keeps the plans of all ranks", *KEEPS_PLANS_IN_INDEX.span
    elif not index.may_lack_attributes:
        yield ".metadata keeps no plans of the ranks", *KEEPS_PLANS_IN_INDEX.span_without


def bounds_of_metadata(common: Mapping[str, Any]) -> Iterator[Bound]:
    """Yield the bounds that follow from the content metadata in a common state."""
    content = common.get("content_metadata")
    if not isinstance(content, dict):
        yield "no content metadata", *DESCRIBES_CONTENT.span_without
        return
    label = sharding_type(dict(common))
    labels = [encoding.labeled_by for encoding in encodings_named(label) if encoding.labeled_by is not None]
    if labels:
        yield f"the content metadata name the optimizer format {label}", *labels[0].span
    elif "singleton_local_shards" in content:
        yield "the content metadata have singleton_local_shards", *DESCRIBES_LOCAL_SHARDS.span
    else:
        _, last = DESCRIBES_LOCAL_SHARDS.span_without
        yield "the content metadata lack singleton_local_shards", DESCRIBES_CONTENT.since, last
