"""Checkpoints that genuine Megatron-LM saves once for all the tests of a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.online.jobs import LAST, LOCAL_SPEC_LLAMA, Job, Layout, train_and_save


@pytest.fixture(scope="session")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """GPT-2-like, tied embeddings, bf16, saved asynchronously as TP1 x PP4 x DP2."""
    folder = tmp_path_factory.mktemp("gpt")
    return train_and_save(folder, Layout(1, 4, 8), more=["--use-dist-ckpt", "--async-save"])


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Llama-like: SwiGLU, grouped queries, untied, bf16, saved synchronously as TP2 x PP2 x DP2; default padding."""
    layout = Layout(2, 2, 8, vocabulary=256)
    return train_and_save(tmp_path_factory.mktemp("llama"), layout, more=LOCAL_SPEC_LLAMA)


@pytest.fixture(scope="session")
def fp32_gpt(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Trained in fp32 to the end, so that what comes after the checkpoint is known."""
    return train_and_save(tmp_path_factory.mktemp("fp32"), Layout(1, 4, 8), precision=(), until=LAST)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test's own job lives."""
    return tmp_path / "job"
