"""Test that errors of this package that leave a framework's function are instances of its types, too."""

from __future__ import annotations

import pickle

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from mcore_ckpt_ext import errors
from mcore_ckpt_ext.collectives import agree
from mcore_ckpt_ext.errors import CheckpointError, ResumeRefusedError, UnsupportedCheckpointError
from mcore_ckpt_ext.megatron.patch_points import PATCH_POINTS
from mcore_ckpt_ext.patching.replaced_errors import add_replaced_types

LOOKUP, FAILURE = "builtins:LookupError", "torch.distributed.checkpoint.api:CheckpointException"


def leaving(error: BaseException, *types: str) -> BaseException:
    add_replaced_types(error, types)
    return error


def test_every_error_is_a_runtime_error() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CheckpointError)]
    assert len(kinds) > 5
    assert all(issubclass(kind, RuntimeError) for kind in kinds)


def test_it_is_of_both_types_and_reads_as_before() -> None:
    plain = UnsupportedCheckpointError("it is of an unknown kind", found="this")
    with pytest.raises(LookupError) as caught:
        raise leaving(UnsupportedCheckpointError("it is of an unknown kind", found="this"), LOOKUP, FAILURE)
    error = caught.value
    assert isinstance(error, (UnsupportedCheckpointError, CheckpointException))
    assert (type(error).__name__, type(error).__module__) == (type(plain).__name__, type(plain).__module__)
    assert (str(error), error.args, error.found) == (str(plain), plain.args, plain.found)
    assert error.failures == {}


def test_the_failures_of_the_ranks_are_those_of_the_cause() -> None:
    failures = {1: (OSError("the disk is gone"), None)}
    with pytest.raises(CheckpointException) as caught:
        try:
            raise ResumeRefusedError("rank 1 refused") from CheckpointException("read", failures)
        except ResumeRefusedError as error:
            add_replaced_types(error, [FAILURE])
            raise
    assert caught.value.failures == failures
    assert str(caught.value) == "rank 1 refused"


def test_a_second_function_that_it_leaves_adds_nothing() -> None:
    once = leaving(ResumeRefusedError("no"), LOOKUP)
    kind = type(once)
    assert type(leaving(once, LOOKUP)) is kind


def test_types_of_modules_that_are_not_there_are_left_out() -> None:
    error = leaving(ResumeRefusedError("no"), "no_such_module:Error", "builtins:no_such_class")
    assert type(error) is ResumeRefusedError


def test_other_errors_stay_as_they_are() -> None:
    assert type(leaving(OSError("no"), LOOKUP)) is OSError


def test_it_can_be_sent_to_another_process() -> None:
    sent = pickle.loads(pickle.dumps(leaving(ResumeRefusedError("rank 1 refused"), LOOKUP)))
    assert (type(sent), str(sent)) == (ResumeRefusedError, "rank 1 refused")


def test_its_reason_is_kept_where_ranks_agree_on_it() -> None:
    def work() -> None:
        raise leaving(UnsupportedCheckpointError("it is of an unknown kind"), FAILURE)

    with pytest.raises(ResumeRefusedError, match="rank 0: UnsupportedCheckpointError: it is of an unknown kind"):
        agree("looking", work)


def test_every_function_that_loads_or_saves_names_what_it_replaces() -> None:
    named = {str(patch_point).rpartition(".")[2] for patch_point in PATCH_POINTS if patch_point.raises}
    assert named == {
        "load_checkpoint",
        "save_checkpoint",
        "schedule_async_save",
        "maybe_finalize_async_save",
        "load",
    }
