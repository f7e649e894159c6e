"""Test each format of each version, written by genuine Megatron-LM of that version, with three layouts on 0.19.2.

One launch for each layout loads all of them into one model, one after the other; before each load the live optimizer is
filled with noise. The dump of the live optimizer equals the state of the job that saved, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_on_cpu.dump_optimizer import assemble, parameter_settings

from tests.harness.cases import Case, Outcomes, load_all
from tests.harness.checkouts import installed_is_before
from tests.harness.checkpoints import fixture_named
from tests.harness.jobs import differing
from tests.harness.layouts import Layout
from tests.harness.thorough import rows_of_run

LAYOUTS = [Layout(2, 2, 4), Layout(1, 1, 2), Layout(4, 1, 4), Layout(1, 4, 4)]
LAST_LEARNING_RATE = 0.0009816326530612245  # of the fourth step, the same in all
LEGACY = {"ckpt_format": "torch"}
TWO_LAYERS = {"num_layers": 2}
UNTIED = {"untie_embeddings_and_output_weights": True}
GATED = {"swiglu": True, "ffn_hidden_size": 64}
# Fixture: arguments of the model beyond the tiny GPT's, arguments to load with.
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "p01": ({}, {}),  # dp_reshardable, 0.16
    "p10": ({}, {}),  # dp_reshardable, 0.19
    "p12": (TWO_LAYERS, {}),  # dp_reshardable, torch's AdamW
    "p04": ({}, {}),  # fully_reshardable
    "p05": ({}, {}),  # fully_sharded_model_space
    "p06": ({}, {}),  # dp_zero_gather_scatter
    "p07": ({"max_position_embeddings": 35}, {}),  # fully_sharded_bucket_space
    "p08": ({"padded_vocab_size": 256}, LEGACY),  # legacy with distributed optimizer, TP2 x PP2
    "p08b": ({}, LEGACY),  # the same, PP4
    "p08c": (TWO_LAYERS, LEGACY),  # legacy without distributed optimizer
    "p31": (TWO_LAYERS | UNTIED | GATED, {}),  # zarr, fully_sharded_bucket_space
    "p32": (TWO_LAYERS | UNTIED, {}),  # zarr, dp_zero_gather_scatter
    "p33": (TWO_LAYERS | GATED, {}),  # zarr, fully_sharded_model_space
    "p50": ({}, {}),  # fsdp_dtensor, by Megatron-FSDP
    "p51": (TWO_LAYERS | UNTIED, {}),  # torch_dcp, by torch's FSDP
}

if installed_is_before(0, 19):
    del FORMATS["p10"]  # 0.19 has no common.pt, without which earlier releases read nothing


def fits(name: str, layout: Layout) -> bool:
    """Whether a layout can hold the model, and stock Megatron refuses it: another one than was saved, or its format."""
    job = fixture_named(name).job
    written = (job["layout"]["tp"], job["layout"]["pp"])
    refused = written != (layout.tensor, layout.pipeline) or name.startswith(("p3", "p5"))
    return refused and job["args"]["num_layers"] % layout.pipeline == 0


CASES = [(layout, name) for layout in LAYOUTS for name in FORMATS if fits(name, layout)]


def is_daily(layout: Layout, name: str) -> bool:
    """Whether the test command has this layout for the fixture: with tensor parallelism, or with four stages."""
    first = list(FORMATS).index(name) % 2
    return layout == next(one for one in (LAYOUTS[0], LAYOUTS[3], LAYOUTS[0])[first:] if fits(name, one))


ROWS = [pytest.param(*case, marks=[] if is_daily(*case) else [pytest.mark.nightly]) for case in CASES]
Loaded = Callable[[Layout], tuple[Path, Outcomes]]


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Gives the folder of the dumps of a layout, and what the ranks report."""
    needed = rows_of_run(request, "layout", "name")

    @functools.cache
    def of_layout(layout: Layout) -> tuple[Path, Outcomes]:
        folder = tmp_path_factory.mktemp(f"formats_{layout.tensor}_{layout.pipeline}")
        cases = [
            Case(name, fixture_named(name).run, arguments, model=model, dump=folder / name)
            for name, (model, arguments) in FORMATS.items()
            if (layout, name) in needed
        ]
        return folder, load_all(folder / "job", layout, cases, are_rehearsed=True)

    return of_layout


@pytest.mark.parametrize(("layout", "name"), ROWS, ids=lambda value: str(value).replace(" ", ""))
def test_the_live_optimizer_equals_that_of_the_job_that_wrote(layout: Layout, name: str, loaded: Loaded) -> None:
    folder, outcomes = loaded(layout)
    assert [rank["error"] for rank in outcomes[name]] == [None] * layout.ranks
    assert [rank["iteration"] for rank in outcomes[name]] == [4] * layout.ranks
    assert differing(fixture_named(name).truth, assemble(folder / name)) == []
    # p04 is intact: stock Megatron loads it, and the masters are proven afterwards.
    assert [rank["resumes"] for rank in outcomes[name]] == [0 if name == "p04" else 1] * layout.ranks


@pytest.mark.parametrize(("layout", "name"), ROWS, ids=lambda value: str(value).replace(" ", ""))
def test_settings_are_those_of_the_parameter(layout: Layout, name: str, loaded: Loaded) -> None:
    """Up to 0.13 Megatron takes groups by position: weight decay then changes hands on later pipeline stages."""
    folder, _ = loaded(layout)
    truth = fixture_named(name).truth
    for parameter, settings in parameter_settings(folder / name).items():
        decays = truth[f"weight.{parameter}"].dim() > 1
        expected = {"wd_mult": float(decays), "weight_decay": 0.01 * decays, "step": 4, "lr": LAST_LEARNING_RATE}
        assert {key: settings[key] for key in expected} == pytest.approx(expected), parameter


def test_every_format_is_resumed_under_three_other_layouts() -> None:
    assert all(sum(chosen == name for _, chosen in CASES) >= 3 for name in FORMATS)
