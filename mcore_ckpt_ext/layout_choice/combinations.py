"""Combines the sizes of every dimension whose product is the number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import isqrt, prod

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.order import distance

_MOST_VIRTUAL_STAGES = 16


class Combinations:
    """The sizes of every dimension to evaluate, respecting pins.

    Combinations are made in three steps, so that a rule about the first dimensions excludes all combinations of the
    later ones at once. Dimensions of later steps are as near to those of the old layout as possible.
    """

    def __init__(self, job: JobArguments, old: ParallelLayout, gpus: int, pins: Mapping[str, int]) -> None:
        """Begin with a job that had the layout `old`, for a number of GPUs and with fixed sizes."""
        self._old = old
        self._gpus = gpus
        self._pins = pins
        self._layers = job.num_layers or 1
        self._experts = job.num_experts or 1
        small = [size for size in range(1, isqrt(gpus) + 1) if gpus % size == 0]
        self._divisors = sorted({*small, *(gpus // size for size in small)})

    def dense_layouts(self) -> Iterator[ParallelLayout]:
        """Yield combinations of TP, PP and CP whose product divides the number of GPUs."""
        gpus = self._gpus
        pins = self._pins
        # If pins make this impossible, combinations are evaluated nevertheless, to report the violated rule.
        can_divide = gpus % prod(pins.get(name, 1) for name in ("tensor", "pipeline", "context")) == 0
        pipelines = [size for size in self._divisors if size <= self._layers + 2]
        choices = (self._of("tensor", self._divisors), self._of("pipeline", pipelines))
        for tensor, pipeline, context in product(*choices, self._of("context", self._divisors)):
            ranks = tensor * pipeline * context
            if can_divide and gpus % ranks:
                continue
            dense = ParallelLayout(
                tensor=tensor, pipeline=pipeline, virtual_pipeline=1, expert=1, expert_tensor=tensor, context=context,
                data=max(gpus // ranks, 1), world=gpus,
            )  # fmt: skip
            near = min(self.expert_layouts(dense), key=self._distance)
            yield min(self.stage_layouts(near), key=self._distance)

    def expert_layouts(self, dense: ParallelLayout) -> Iterator[ParallelLayout]:
        """Yield the layout with every size of EP and ETP."""
        for expert in self._of("expert", [size for size in self._divisors if size <= self._experts]):
            tensors = {dense.tensor}
            if expert > 1:
                tensors |= {1, self._old.expert_tensor}
            elif self._old.expert == 1 and self._old.separates_experts:
                tensors.add(self._old.expert_tensor)
            for expert_tensor in self._of("expert_tensor", sorted(tensors)):
                yield replace(dense, expert=expert, expert_tensor=expert_tensor)

    def stage_layouts(self, layout: ParallelLayout) -> Iterator[ParallelLayout]:
        """Yield the layout with every number of virtual stages."""
        # With more pipeline ranks than layers, some ranks have only the embedding or the loss.
        # Two virtual stages may be more than the layers, too (`E|t|t||L`).
        least = 2 if layout.pipeline <= self._layers else 1
        per_rank = self._layers // layout.pipeline
        most = max(least, min(_MOST_VIRTUAL_STAGES, per_rank)) if layout.pipeline > 1 else 1
        # Many stages are listed if they have equal numbers of layers.
        even = [size for size in range(most + 1, per_rank + 1) if self._layers % (layout.pipeline * size) == 0]
        for stages in self._of("virtual_pipeline", [*range(1, most + 1), *(even if layout.pipeline > 1 else ())]):
            yield replace(layout, virtual_pipeline=stages)

    def _of(self, name: str, otherwise: Sequence[int]) -> Sequence[int]:
        return [self._pins[name]] if name in self._pins else otherwise

    def _distance(self, layout: ParallelLayout) -> float:
        return distance(layout, self._old)
