"""Global ranks and their places in a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mcore_ckpt_ext.layout.parallel import ParallelLayout


@dataclass(frozen=True)
class RankGrid:
    """The order of ranks: tensor ranks vary fastest, then context, data, pipeline.

    With `--use-tp-pp-dp-mapping` (`pipeline_first`) pipeline ranks vary faster than data ranks. Expert ranks divide the
    ranks of a pipeline stage independently. Source: `RankGenerator` and its orders, megatron/core/parallel_state.py
    and megatron/training/initialize.py, core_v0.7.0 to 0.19.2.
    """

    layout: ParallelLayout
    pipeline_first: bool = False

    @property
    def is_known(self) -> bool:
        """True if all sizes that determine a rank's place are known, and there are no other dimensions.

        Generalized tensor parallelism adds a dimension (`_inject_gtp_remat_axis`, parallel_state.py, 0.19.2).
        """
        layout = self.layout
        has_no_others = layout.tensor * layout.pipeline * layout.context * layout.data == layout.world
        return has_no_others and layout.unknown.isdisjoint(("tensor", "pipeline", "context", "data", "world"))

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Return (tensor, context, data, pipeline) of a global rank."""
        layout = self.layout
        rest, tensor = divmod(rank, layout.tensor)
        rest, context = divmod(rest, layout.context)
        if self.pipeline_first:
            data, pipeline = divmod(rest, layout.pipeline)
        else:
            pipeline, data = divmod(rest, layout.data)
        return tensor, context, data, pipeline

    def possible_expert_ranks(self, rank: int) -> frozenset[int]:
        """Return the possible expert-parallel ranks of a global rank.

        Since core_v0.9 experts divide a stage's ranks regardless of context parallelism; before, data ranks only.
        """
        layout = self.layout
        return frozenset(
            rank // step % layout.expert for step in (layout.expert_tensor, layout.tensor * layout.context)
        )

    @cached_property
    def first_ranks(self) -> Mapping[tuple[int, int, int], int]:
        """The first global rank at each place (tensor, pipeline, expert) that has one."""
        layout = self.layout
        first_ranks = dict[tuple[int, int, int], int]()
        for rank in range(layout.world):
            tensor, _, _, pipeline = self.coordinates(rank)
            first_ranks.setdefault((tensor, pipeline, rank // layout.expert_tensor % layout.expert), rank)
        return first_ranks

    def place(self, rank: int) -> str:
        """Describe a global rank's place."""
        if not self.is_known:
            return "not known"
        layout = self.layout
        tensor, context, data, pipeline = self.coordinates(rank)
        sizes = ((layout.tensor, "tensor", tensor), (layout.pipeline, "pipeline", pipeline))
        more = ((layout.context, "context", context), (layout.data, "data", data))
        return ", ".join(f"{name} {number}" for size, name, number in (*sizes, *more) if size > 1) or "the only rank"

    def model_place(self, tensor: int, pipeline: int, expert: int) -> str:
        """Describe the place of a model-parallel rank."""
        layout = self.layout
        dense = ((layout.tensor, "tensor", tensor), (layout.pipeline, "pipeline", pipeline))
        sizes = (*dense, (layout.expert, "expert", expert))
        return ", ".join(f"{name} {number}" for size, name, number in sizes if size > 1) or "the only one"
