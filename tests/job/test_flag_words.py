"""Test the names of arguments whose flags have other words, against the parser of the installed Megatron."""

from __future__ import annotations

from argparse import Action, ArgumentParser

import pytest

from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.families.forward_pass import classified_arguments
from mcore_ckpt_ext.families.passed_arguments import check_passed
from mcore_ckpt_ext.job.arguments.flag_words import stored_argument


def flags() -> list[tuple[str, Action]]:
    """The flags of the installed Megatron, as words joined by underscores."""
    from megatron.training.arguments import add_megatron_arguments

    parser = ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    options = ((option, action) for action in parser._actions for option in action.option_strings)
    return [(option.removeprefix("--").replace("-", "_"), action) for option, action in options if option[:2] == "--"]


def test_a_flag_with_other_words_is_refused_with_its_argument() -> None:
    """All of Megatron's, except those that older releases stored under these words."""
    other = [(words, action) for words, action in flags() if words != action.dest and action.nargs != 0]
    other += [(words, action) for words, action in flags() if words != action.dest and action.const is False]
    assert len(other) > 80
    for words, action in other:
        if (stored := stored_argument(words)) is None:
            assert classified_arguments([words]) or action.dest.endswith(("_deprecated", "_prefix_caching")), words
            continue
        assert stored == action.dest + ("=False" if action.const is False else "")
        with pytest.raises(UsageError, match=f"under another name; found: {words}; expected: {stored}; hint: write "):
            check_passed({words: 2})


def test_no_argument_is_refused_under_its_own_name() -> None:
    assert [words for words, action in flags() if words == action.dest and stored_argument(words)] == []


def test_the_group_of_micro_batches_is_named() -> None:
    """Its flag spells out what its argument abbreviates."""
    assert stored_argument("microbatch_group_size_per_virtual_pipeline_stage") == "microbatch_group_size_per_vp_stage"
    assert stored_argument("disable_bias_linear") == "add_bias_linear=False"
    assert stored_argument("microbatch_group_size_per_vp_stage") is stored_argument("no_such_argument") is None
