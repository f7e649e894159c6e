"""Test what wraps Megatron's functions of a save, in a process without ranks."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from mcore_ckpt_ext.errors import SaveFailedError
from mcore_ckpt_ext.megatron.save import wrap_save_state_dict_async_finalize

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "saving_rank.py"


class Writer:
    """A storage writer, as far as the last step of a save uses it."""

    def finish(self, metadata: Any, results: Any) -> None:
        if metadata is None:
            raise OSError("no space left")

    def retrieve_write_results(self) -> Any:
        return []


@wrap_save_state_dict_async_finalize
def finalize(writer: Writer, metadata: Any) -> str:
    writer.finish(metadata, writer.retrieve_write_results())
    return "finished"


def test_the_result_of_writing_the_index_is_that_of_megatron() -> None:
    assert finalize(Writer(), Metadata({})) == "finished"


def test_an_index_that_cannot_be_written_fails_the_save() -> None:
    with pytest.raises(SaveFailedError, match=r"the index could not be written:\n  OSError: no space left"):
        finalize(Writer(), None)


def test_the_benchmark_times_functions_that_a_save_calls() -> None:
    """An inherited method of the same name would be timed, and never called."""
    values = {
        target.id: statement.value
        for statement in ast.parse(BENCHMARK.read_text()).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    for name, kind, functions in ast.literal_eval(values["OWN"]):
        module = importlib.import_module(f"mcore_ckpt_ext.{name}")
        assert set(functions) <= vars(module if kind is None else getattr(module, kind)).keys(), (name, kind)
