"""Which rows of one of Megatron's parameters make up a Hugging Face tensor, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from mcore_ckpt_ext.job.model_arguments import ModelArguments

Span = tuple[int, int]
"""First row and number of rows."""


@dataclass(frozen=True)
class Rows:
    """Spans of rows, one after the other.

    Attributes:
        spans: called with the number of rows and the job's arguments.
        transposed: Hugging Face stores the matrix transposed.
        shift: added to Megatron's values in Hugging Face's tensor.
        interleaved: number of equally sized parts of the only span whose rows alternate in Hugging Face's tensor.
    """

    spans: Callable[[int, ModelArguments], Sequence[Span]]
    transposed: bool = False
    interleaved: int = 1
    shift: float = 0.0


def _whole(rows: int, arguments: ModelArguments) -> Sequence[Span]:
    return [(0, rows)]


def _of_groups(which: str) -> Callable[[int, ModelArguments], Sequence[Span]]:
    """`linear_qkv` holds, one query group after the other, its queries, gates if any, key and value (attention.py)."""

    def spans(rows: int, arguments: ModelArguments) -> Iterator[Span]:
        head = arguments.kv_channels
        groups = arguments.num_query_groups
        queries = arguments.num_attention_heads // groups
        gates = queries if arguments.attention_output_gate else 0
        places = {
            # Hugging Face has each head's gate behind its queries, Megatron all of a group's gates behind all queries.
            "query": [(at, 1) for query in range(queries) for at in range(query, queries + gates, queries)]
            if gates else [(0, queries)],
            "key": [(queries + gates, 1)], "value": [(queries + gates + 1, 1)],
        }[which]  # fmt: skip
        for group in range(groups):
            for first, count in places:
                yield (group * (queries + gates + 2) + first) * head, count * head

    return lambda rows, arguments: list(spans(rows, arguments))


def _half(which: int) -> Callable[[int, ModelArguments], Sequence[Span]]:
    """A gated `linear_fc1` holds the gate, then the up projection (mlp.py)."""
    return lambda rows, arguments: [(which * (rows // 2), rows // 2)]


WHOLE = Rows(_whole)
QUERY, KEY, VALUE = (Rows(_of_groups(which)) for which in ("query", "key", "value"))
GATE, UP = Rows(_half(0)), Rows(_half(1))
GATE_AND_UP_BY_TURNS = Rows(_whole, interleaved=2)
"""A row of the gate, then one of the up projection (gpt-oss)."""


def joined(*parts: Rows) -> Rows:
    """Concatenate the rows."""
    return Rows(lambda rows, arguments: [span for part in parts for span in part.spans(rows, arguments)])


def transposed(rows: Rows) -> Rows:
    """The same, where Hugging Face stores the matrix transposed (GPT-2's Conv1D, the experts of gpt-oss)."""
    return replace(rows, transposed=True)


def shifted(by: float) -> Rows:
    """All rows, with `shift` added in Hugging Face's tensor; rounded once."""
    return Rows(_whole, shift=by)
