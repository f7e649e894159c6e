"""Test what a checkpoint and a live job must have in common; differences are refused before planning."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt_ext.errors import ModelMismatchError, ResumeRefusedError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.views import rename_tensors
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.live.compatibility import check_names, check_tokens
from mcore_ckpt_ext.megatron.probe import check_all_have_the_same
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.settings import READ_ONCE
from tests.harness.checkpoints import fixture_named


@pytest.mark.parametrize(
    ("stated", "tokens"),
    [
        ({"vocab_size": 127}, 127),
        ({"vocab_size": 127, "tokenizer_type": "NullTokenizer"}, 128),  # and the end of a document
        ({"vocab_size": None}, None),
    ],
)
def test_the_tokens_of_a_vocabulary(stated: dict[str, object], tokens: int | None) -> None:
    assert JobArguments.of(stated).tokens == tokens


@pytest.mark.parametrize(("tokens", "rows"), [(127, 127), (127, 128), (None, 96), (127, None)])
def test_padding_may_come_and_go(tokens: int | None, rows: int | None) -> None:
    check_tokens(tokens, JobArguments.of({"padded_vocab_size": rows}), Path("run"))


def test_tokens_may_not() -> None:
    with pytest.raises(ModelMismatchError, match="tokens with their.*found: 127.*at most 96.*where: run"):
        check_tokens(127, JobArguments.of({"padded_vocab_size": 96}), Path("run"))


def test_settings_that_decide_together_are_the_same_on_all_ranks() -> None:
    """Else one rank would wait in a collective that another does not know of."""
    ranks = [{READ_ONCE.name: "True", "OTHER": "1"}, {READ_ONCE.name: "True", "OTHER": "1"}]
    check_all_have_the_same(ranks)
    ranks.append({READ_ONCE.name: "False", "OTHER": "1"})
    with pytest.raises(ResumeRefusedError, match="READ_ONCE: True and False; expected: the same on all ranks"):
        check_all_have_the_same(ranks)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_embeddings_are_tied_on_both_sides_or_on_neither(prefix: str) -> None:
    """Of a language model inside a larger one, too."""
    tied = open_checkpoint(fixture_named("p01").run)
    tied = rename_tensors(tied, {name: prefix + name for name in tied.names(WEIGHT)})
    live, output_layer = set(tied.names(WEIGHT)), f"{prefix}output_layer.weight"
    check_names(tied, live)
    with pytest.raises(ModelMismatchError, match=f"tied.*expected: {output_layer}.*resume without --untie-emb"):
        check_names(tied, live | {output_layer})
    untied = open_checkpoint(fixture_named("p02").run)
    untied = rename_tensors(untied, {name: prefix + name for name in untied.names(WEIGHT)})
    live = set(untied.names(WEIGHT))
    check_names(untied, live)
    with pytest.raises(ModelMismatchError, match="resume with --untie-embeddings-and-output-weights"):
        check_names(untied, live - {output_layer})
