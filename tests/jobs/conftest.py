"""Checkpoints that genuine Megatron-LM saves once for all the tests of a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.jobs import LAST, Job, train_and_save
from tests.harness.layouts import Layout
from tests.harness.models import LLAMA


@pytest.fixture(scope="session")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """GPT-2-like, tied embeddings, bf16, saved asynchronously as TP1 x PP4 x DP2."""
    folder = tmp_path_factory.mktemp("gpt")
    return train_and_save(folder, Layout(1, 4, 8), more=["--use-dist-ckpt", "--async-save"], records_buffers=True)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Llama-like: SwiGLU, grouped queries, untied, bf16, saved synchronously as TP2 x PP2 x DP2; default padding."""
    layout = Layout(2, 2, 8, vocabulary=256)
    return train_and_save(tmp_path_factory.mktemp("llama"), layout, more=LLAMA, records_buffers=True)


@pytest.fixture(scope="session")
def fp32_gpt(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Trained in fp32 to the end, so that what comes after the checkpoint is known."""
    folder = tmp_path_factory.mktemp("fp32")
    return train_and_save(folder, Layout(1, 4, 8), precision=(), until=LAST, records_buffers=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test's own job lives."""
    return tmp_path / "job"
