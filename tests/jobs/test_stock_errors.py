"""Test resumes in which stock Megatron fails with a bare KeyError or AssertionError: the refusals are clear."""

from __future__ import annotations

import pytest

from tests.harness.checkouts import EITHER
from tests.harness.jobs import LEGACY, SAVED
from tests.harness.layouts import Layout
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

PIPELINE, TENSOR = Layout(1, 2, 2), Layout(2, 1, 2)
LARGER = ("--global-batch-size", "12")
FLAGS = ("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler")
FORMATS = {"torch_dist": (), "legacy": LEGACY}


@pytest.fixture(scope="module", params=EITHER)
def turns(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Saves without an optimizer, and with one; resumes under another layout, with another batch size."""
    folder = tmp_path_factory.mktemp("errors")
    found = [Turn(folder / "saved", PIPELINE, saves=True, until=SAVED)]
    load = {"load": folder / "saved" / "checkpoints"}
    found += [
        Turn(folder / f"larger{flag}", TENSOR, more=[*LARGER, *([flag] if flag else [])], **load)
        for flag in ("", *FLAGS)
    ]
    for name, of_format in FORMATS.items():
        run = folder / f"{name} alone"
        found.append(Turn(run, PIPELINE, saves=True, until=SAVED, more=[*of_format, "--no-save-optim"]))
        for layout in (PIPELINE, TENSOR):
            resumed, at = folder / f"{name} on {layout}", {"load": run / "checkpoints"}
            found.append(Turn(resumed, layout, more=of_format, **at))
            if name == "torch_dist":
                anew = [*of_format, "--no-load-optim"]
                found.append(Turn(folder / f"{name} anew {layout}", layout, more=anew, **at))
    return run_in_turn(folder, found, of_checkout=request.param)


@pytest.mark.parametrize("layout", [PIPELINE, TENSOR], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_without_its_optimizer(name: str, layout: Layout, turns: Results) -> None:
    refused = turns[f"{name} on {layout}"]
    assert refused.returncode != 0
    assert "KeyError" not in refused.output
    assert "the checkpoint has no optimizer" in refused.output
    assert "resume with --no-load-optim" in refused.output
    if name == "torch_dist":
        turns.job(f"{name} anew {layout}")


def test_another_batch_size_needs_a_word_on_whose_schedule_counts(turns: Results) -> None:
    refused = turns["larger"]
    assert refused.returncode != 0
    assert "ModelMismatchError: the schedule of the learning rate" in refused.output
    assert "class input value 24" in refused.output
    assert all(flag in refused.output for flag in FLAGS)
    for flag in FLAGS:
        assert "optimizer resumed from" in turns.job(f"larger{flag}").output


def test_the_line_names_the_iteration(turns: Results) -> None:
    (line,) = [line for line in turns.job(f"larger{FLAGS[0]}").said if "optimizer resumed from" in line]
    assert f"iteration {SAVED} was loaded" in line
