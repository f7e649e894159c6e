"""Fixtures with checkpoints that genuine Megatron-LM saves once for all tests of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.jobs import LAST, Job, train_and_save
from tests.harness.layouts import Layout
from tests.harness.made_once import made_once
from tests.harness.models import LLAMA


def saved_once(factory: pytest.TempPathFactory, name: str, layout: Layout, **options: Any) -> Job:
    """A job that trains and saves."""

    def train(folder: Path) -> None:
        (folder / "output").write_text(train_and_save(folder, layout, records_buffers=True, **options).output)

    folder = made_once(factory, name, train)
    return Job(folder, layout, (folder / "output").read_text())


@pytest.fixture(scope="session")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """GPT-2-like, tied embeddings, bf16, saved asynchronously as TP1 x PP4 x DP2."""
    return saved_once(tmp_path_factory, "gpt", Layout(1, 4, 8), more=["--use-dist-ckpt", "--async-save"])


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Llama-like: SwiGLU, grouped queries, untied, bf16, saved synchronously as TP2 x PP2 x DP2; default padding."""
    return saved_once(tmp_path_factory, "llama", Layout(2, 2, 8, vocabulary=256), more=LLAMA)


@pytest.fixture(scope="session")
def fp32_gpt(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Trained in fp32 to the end, so that what comes after the checkpoint is known."""
    return saved_once(tmp_path_factory, "fp32", Layout(1, 4, 8), precision=(), until=LAST)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test's own job lives."""
    return tmp_path / "job"
