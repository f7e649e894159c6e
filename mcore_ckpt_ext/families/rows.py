"""Selects the rows of a Megatron parameter that form a Hugging Face tensor, and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from mcore_ckpt_ext.job.model_arguments import ModelArguments

Span = tuple[int, int]
"""First row and number of rows."""


@dataclass(frozen=True)
class Rows:
    """A sequence of spans of rows.

    Attributes:
        spans: returns the spans, given the number of rows and the arguments of the model.
        transposed: Hugging Face stores the matrix transposed.
        shift: number added to Megatron's values in Hugging Face's tensor.
        interleaved: number of equally sized parts of the only span whose rows alternate in Hugging Face's tensor.
    """

    spans: Callable[[int, ModelArguments], Sequence[Span]]
    transposed: bool = False
    interleaved: int = 1
    shift: float = 0.0


def _whole(rows: int, arguments: ModelArguments) -> Sequence[Span]:
    return [(0, rows)]


def _spans_of_groups(which: str) -> Callable[[int, ModelArguments], Sequence[Span]]:
    """Return rows of `linear_qkv`, which has queries, gates, key and value for each query group.

    Source: attention.py.
    """

    def spans(rows: int, arguments: ModelArguments) -> Iterator[Span]:
        head = arguments.kv_channels
        groups = arguments.num_query_groups
        queries = arguments.num_attention_heads // groups
        gates = queries if arguments.attention_output_gate else 0
        places = {
            # In Hugging Face a head's gate follows its queries; in Megatron a group's gates follow all of its queries.
            "query": [(at, 1) for query in range(queries) for at in range(query, queries + gates, queries)]
            if gates
            else [(0, queries)],
            "key": [(queries + gates, 1)],
            "value": [(queries + gates + 1, 1)],
        }[which]
        for group in range(groups):
            for first, count in places:
                yield (group * (queries + gates + 2) + first) * head, count * head

    return lambda rows, arguments: list(spans(rows, arguments))


def _half(which: int) -> Callable[[int, ModelArguments], Sequence[Span]]:
    """Return one half of the rows of a gated `linear_fc1`: the gate, or the up projection (mlp.py)."""
    return lambda rows, arguments: [(which * (rows // 2), rows // 2)]


WHOLE = Rows(_whole)
QUERY, KEY, VALUE = (Rows(_spans_of_groups(which)) for which in ("query", "key", "value"))
GATE = Rows(_half(0))
UP = Rows(_half(1))
GATE_AND_UP_BY_TURNS = Rows(_whole, interleaved=2)
"""Alternating rows of gate and up projection (gpt-oss)."""


def concatenate(*parts: Rows) -> Rows:
    """Concatenate several selections of rows."""
    return Rows(lambda rows, arguments: [span for part in parts for span in part.spans(rows, arguments)])


def transpose(rows: Rows) -> Rows:
    """Return the rows of a matrix that Hugging Face stores transposed (GPT-2's Conv1D, gpt-oss experts)."""
    return replace(rows, transposed=True)


def shift_all(by: float) -> Rows:
    """Return all rows, with a number added in Hugging Face's tensor; rounded once."""
    return Rows(_whole, shift=by)
