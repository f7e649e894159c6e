"""Parses `--pipeline-model-parallel-layout`, which lists the layers of each pipeline stage.

Source: `PipelineParallelLayerLayout` (megatron/core/transformer/pipeline_parallel_layer_layout.py, core_v0.13.0 to
0.19.2 and the head of August 2026): `parse_str_to_list`, `get_num_layers_to_build`, `get_layer_offset`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

EMBEDDING = "E"
DECODER = "t"
PREDICTION = "m"
LOSS = "L"
_LETTER = {"embedding": EMBEDDING, "decoder": DECODER, "mtp": PREDICTION, "loss": LOSS}
# `(ab|cd)*3`, then `x*3`, each expanded once and in this order.
_REPEATED = (re.compile(r"\(([^)]+)\)\*(\d{1,6})"), re.compile(r"(.)\*(\d{1,6})"))
_MOST = 1 << 16
"""Largest number of letters in a layout, many times that of known jobs."""


@dataclass(frozen=True)
class StageLayout:
    """The content of the model chunks, in the order of the forward pass.

    Attributes:
        stages: one letter for each part of a chunk: the embedding, decoder layers, layers for multi-token prediction,
            the loss.
    """

    stages: tuple[str, ...]

    @classmethod
    def parse(cls, value: object) -> StageLayout | None:
        """Parse an argument given as text or as lists of names; return None for an invalid one."""
        if isinstance(value, str):
            stages = _expand(value)
        elif isinstance(value, list) and all(isinstance(stage, list) for stage in value):
            stages = [_letters(stage) for stage in value]
        else:
            return None
        letters = {EMBEDDING, DECODER, PREDICTION, LOSS}
        if not stages or any(stage is None or not letters.issuperset(stage) for stage in stages):
            return None
        return cls(tuple(stage for stage in stages if stage is not None))

    def layers(self, pipeline: int) -> list[list[range]]:
        """Return global decoder layers by `[pipeline rank][virtual stage]`; chunks are ordered by rank."""
        spans: list[range] = []
        for stage in self.stages:
            first = spans[-1].stop if spans else 0
            spans.append(range(first, first + stage.count(DECODER)))
        return [spans[rank::pipeline] for rank in range(pipeline)]

    def prediction_chunk(self, pipeline: int) -> tuple[int, int] | None:
        """Return the pipeline rank and virtual stage of the only chunk with multi-token prediction.

        Returns:
            None if no chunk has any, or several have (`validate_layer_layout` refuses them).
        """
        chunks = [number for number, stage in enumerate(self.stages) if PREDICTION in stage]
        return (chunks[0] % pipeline, chunks[0] // pipeline) if len(chunks) == 1 else None


def _expand(text: str) -> list[str | None]:
    """Expand a layout given as text, such as `Ettt|(tt|)*29,m|L`, into stages; empty if it is too long."""
    text = text.replace(",", "")
    for pattern in _REPEATED:
        if len(text) + sum(len(match[1]) * int(match[2]) for match in pattern.finditer(text)) > _MOST:
            return []
        text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    return list(text.split("|"))


def _letters(names: Iterable[object]) -> str | None:
    """Return the letters of a stage given as a list of names; None if one is unknown."""
    letters = [_LETTER.get(name.strip().lower()) if isinstance(name, str) else None for name in names]
    known_letters = [letter for letter in letters if letter is not None]
    return "".join(known_letters) if len(known_letters) == len(letters) else None
