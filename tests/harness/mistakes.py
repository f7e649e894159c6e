"""Families with one mistake each, which either loads without an error or drops something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mcore_ckpt_ext.families.config_checks import Config
from mcore_ckpt_ext.families.llama import Llama
from mcore_ckpt_ext.families.rows import KEY, QUERY, VALUE, Rows, Span
from mcore_ckpt_ext.job.model_arguments import ModelArguments


def _key_first(rows: int, arguments: ModelArguments) -> Sequence[Span]:
    """Swap each group's first query and its key."""
    head = arguments.kv_channels
    per_group = arguments.num_attention_heads // arguments.num_query_groups
    spans = []
    for group in range(arguments.num_query_groups):
        start = group * (per_group + 2) * head
        spans += [(start + per_group * head, head), (start + head, (per_group - 1) * head)]
    return spans


def _query_as_key(rows: int, arguments: ModelArguments) -> Sequence[Span]:
    head = arguments.kv_channels
    per_group = arguments.num_attention_heads // arguments.num_query_groups
    return [(group * (per_group + 2) * head, head) for group in range(arguments.num_query_groups)]


def _interleaved(rows: Rows) -> Rows:
    """Take the rows 0, n/2, 1, n/2 + 1, ... of each head, as models do that rotate pairs of neighbors."""

    def spans(count: int, arguments: ModelArguments) -> Sequence[Span]:
        head = arguments.kv_channels
        firsts = [start for first, size in rows.spans(count, arguments) for start in range(first, first + size, head)]
        return [(first + half + row, 1) for first in firsts for row in range(head // 2) for half in (0, head // 2)]

    return Rows(spans)


class ExchangedQueriesAndKeys(Llama):
    rules = tuple(
        replace(rule, rows=Rows(_key_first)) if rule.rows is QUERY
        else replace(rule, rows=Rows(_query_as_key)) if rule.rows is KEY
        else rule
        for rule in Llama.rules
    )  # fmt: skip


class InterleavedHalves(Llama):
    rules = tuple(
        replace(rule, rows=_interleaved(rule.rows)) if rule.rows in (QUERY, KEY) else rule for rule in Llama.rules
    )


class KeysTwice(Llama):
    """A family that omits the values, and would drop them silently."""

    rules = tuple(replace(rule, rows=KEY) if rule.rows is VALUE else rule for rule in Llama.rules)


class WithoutOutput(Llama):
    rules = tuple(rule for rule in Llama.rules if rule.hugging_face != "lm_head.weight")


class FixedEpsilon(Llama):
    """A family that reads another epsilon than it writes."""

    def arguments(self, config: Config) -> ModelArguments:
        return super().arguments(config).replace(layernorm_epsilon=1e-6)
