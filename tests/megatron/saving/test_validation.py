"""Test the judgment of an index as it is written, by torch's own writer and as other releases of torch write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from mcore_ckpt_ext.megatron.saving.validation import collecting_index_problems, problems_on_disk, stored_bytes


class Writer(FileSystemWriter):
    """torch's own, with a method of Megatron's writers that is not called here."""

    def retrieve_write_results(self) -> Any:
        """Refuse the call."""
        raise NotImplementedError


class CopyingWriter(Writer):
    """Adds records to a copy of the index and writes that, as in torch 2.9 to 2.11."""

    def finish(self, metadata: Any, results: Any) -> None:
        """Write the index."""
        super().finish(replace(metadata), results)


class InPlaceWriter(Writer):
    """Adds records to the index that it is given, as in other releases."""

    def finish(self, metadata: Any, results: Any) -> None:
        """Write the index."""
        super().finish(metadata, results)
        metadata.storage_data = {one.index: one.storage_data for of_rank in results for one in of_rank}


@pytest.mark.parametrize("make", [Writer, CopyingWriter, InPlaceWriter])
def test_an_index_is_judged_with_the_records_of_all_writers(make: Callable[[Path], Any], tmp_path: Path) -> None:
    sizes, problems = list[int](), list[str]()

    def judge(metadata: Any) -> list[str]:
        sizes.append(stored_bytes(metadata))
        return list(problems_on_disk(metadata, tmp_path))

    writer = make(tmp_path)
    with collecting_index_problems(writer, judge, problems):
        save({"weight": torch.arange(8.0), "state": "x"}, storage_writer=writer)
    assert problems == []
    assert sizes == [sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))]


@pytest.mark.parametrize("make", [CopyingWriter, InPlaceWriter])
def test_a_record_that_no_writer_reports_is_a_problem(make: Callable[[Path], Any], tmp_path: Path) -> None:
    writer, problems = make(tmp_path), list[str]()
    write = writer.write_data

    def without_the_last(plan: Any, planner: Any) -> Any:
        return write(plan, planner).then(lambda future: future.value()[:-1])

    writer.write_data = without_the_last
    with collecting_index_problems(writer, lambda metadata: list(problems_on_disk(metadata, tmp_path)), problems):
        save({"weight": torch.arange(8.0), "bias": torch.zeros(2)}, storage_writer=writer)
    (problem,) = problems
    assert problem.startswith("1 of 2 records were not written by any rank, first ")
