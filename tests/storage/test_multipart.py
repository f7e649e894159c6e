"""Test the options that bound the memory of an upload."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.storage.multipart import UPLOAD_BYTES, upload_options

GIB = 1 << 30


def of_s3fs(lpath: str, rpath: str, chunksize: int | None = None, max_concurrency: int | None = None) -> None: ...


def of_adlfs(lpath: str, rpath: str, max_concurrency: int | None = None, **kwargs: object) -> None: ...


def of_memory(lpath: str, rpath: str, mode: str = "overwrite", **kwargs: object) -> None: ...


def test_a_file_system_is_passed_the_options_that_it_has() -> None:
    assert upload_options(of_s3fs, GIB).keys() == {"chunksize", "max_concurrency"}
    assert upload_options(of_adlfs, GIB).keys() == {"max_concurrency"}
    assert upload_options(of_memory, GIB) == {}


@pytest.mark.parametrize("size", [0, 1, GIB, 80 * GIB, 400 * GIB, 5000 * GIB])
def test_parts_in_memory_are_bounded_and_s3_accepts_their_number(size: int) -> None:
    options = upload_options(of_s3fs, size)
    part, at_once = options["chunksize"], options["max_concurrency"]
    assert part * 10_000 >= size
    assert part % (256 << 10) == 0
    assert at_once == 1 or part * at_once <= UPLOAD_BYTES
