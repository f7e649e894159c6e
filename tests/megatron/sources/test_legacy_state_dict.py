"""Test which checkpoints are presented to Megatron as legacy ones, because it could not read them."""

from __future__ import annotations

from argparse import Namespace

import megatron.core
import pytest

from mcore_ckpt_ext.megatron.presentation import reasons_to_present, session_to_present
from mcore_ckpt_ext.megatron.running_version import megatron_version
from tests.harness.checkpoints import fixture_named

ARGUMENTS = Namespace(ckpt_format="torch_dist", ckpt_step=None)


@pytest.mark.parametrize(("running", "is_presented"), [("0.18.2", True), ("0.19.0", False)])
def test_a_folder_without_the_file_of_the_common_state(
    running: str, is_presented: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.19.0 wrote p10; earlier releases require `common.pt`, which p01 has."""
    monkeypatch.setattr(megatron.core, "__version__", running)
    later, earlier = fixture_named("p10").run, fixture_named("p01").run
    found = session_to_present(str(later), ARGUMENTS)
    assert (found is not None) == is_presented
    assert session_to_present(str(earlier), ARGUMENTS) is None
    if found is not None:
        assert reasons_to_present(found, ARGUMENTS, megatron_version()) == [
            "the format torch_dist, written by Megatron 0.19 or later"
        ]
