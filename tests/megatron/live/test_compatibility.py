"""What a checkpoint and a live job must have in common: refused before anything is planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.errors import ModelMismatchError, ResumeRefusedError
from mcore_ckpt_ext.megatron.live.compatibility import check_tokens
from mcore_ckpt_ext.megatron.probe import check_all_have_the_same
from mcore_ckpt_ext.settings import READ_ONCE


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
