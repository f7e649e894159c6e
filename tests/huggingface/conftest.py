"""Models that are made once for all the tests of a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils import logging

from tests.huggingface.models import CONFIGS, make

logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of every model, in fp32."""
    root = tmp_path_factory.mktemp("models")
    for name in CONFIGS:
        make(name, root / name)
    return {name: root / name for name in CONFIGS}
