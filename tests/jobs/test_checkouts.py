"""Test that the unchanged `pretrain_gpt.py` of a checkout (MEGATRON_LM_PATH) resumes real checkpoints.

For core_v0.16.1 the reference is stock Megatron itself, on the same machine (the last digits of losses depend on the
processor): it resumes a `fully_reshardable` twin of the checkpoint, which holds the same state in the one format that
it can load under another layout. Both must then continue with exactly the same losses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from megatron_on_cpu.dump_optimizer import assemble, training_state

from mcore_ckpt_ext.operations.comparison import compare
from tests.harness.checkouts import checkout_job, only_for
from tests.harness.checkpoints import Fixture, fixture_named
from tests.harness.jobs import (
    LAST,
    LEGACY,
    OFF,
    SAVED,
    Job,
    assert_same_optimizer,
    assert_same_training_state,
    differing,
    finished,
    resume,
    run_job,
    train_and_save,
    with_vocabulary,
)
from tests.harness.layouts import SEQUENCE, Layout
from tests.harness.models import LLAMA, experts
from tests.harness.saving import assert_trained_meanwhile, durable_lines, run_held, run_saving

# The vocabulary without its padding.
TOKENS = 128


@dataclass(frozen=True)
class Target:
    """A fixture, and a layout of a `stock_reshard` list: its own, or that of a fixture with the same state."""

    fixture: str
    label: str
    listed_in: str = ""

    def __str__(self) -> str:
        return f"{self.fixture}-{self.label}"

    @property
    def source(self) -> Fixture:
        return fixture_named(self.fixture)

    @property
    def entry(self) -> dict[str, Any]:
        listed = fixture_named(self.listed_in).job if self.listed_in else self.source.job
        (entry,) = (entry for entry in listed["stock_reshard"] if entry["label"] == self.label)
        return entry

    @property
    def layout(self) -> Layout:
        entry = self.entry
        divisor = re.search(r"--make-vocab-size-divisible-by (\d+)", entry["args"])
        rows = int(divisor[1] if divisor else 128) * entry["tp"]
        return Layout(entry["tp"], entry["pp"], entry["world"], vocabulary=rows)

    @property
    def flags(self) -> list[str]:
        return re.sub(r"--make-vocab-size-divisible-by \d+", "", self.entry["args"]).split()


def labels(fixture: str) -> list[str]:
    """The layouts of a fixture's `stock_reshard` list."""
    return [entry["label"] for entry in fixture_named(fixture).job["stock_reshard"]]


# p04, p05, p06 and p08b hold p01's state in other formats, of 0.16, 0.12, 0.8, and in legacy files.
FORMATS = {"p04": "fully_reshardable", "p05": "fully_sharded_model_space", "p06": "dp_zero_gather_scatter"}
FORMATS |= {"p08b": "legacy_torch"}
TARGETS = [Target(fixture, label) for fixture in ("p01", "p02", "p03") for label in labels(fixture)]
TARGETS += [Target(fixture, label, "p01") for fixture in FORMATS for label in labels("p01")]
EXPERTS = [Target("p09", label) for label in labels("p09")]


def own_flags(fixture: Fixture) -> tuple[Layout, list[str]]:
    """The layout and the model's arguments with which a fixture was written."""
    layout, words = fixture.job["layout"], fixture.job["argv"]
    words = words.split() if isinstance(words, str) else words
    begin = words.index("--save-interval") + 2
    rows = fixture.job["vocab"]["padded_vocab_size"]
    return Layout(layout["tp"], layout["pp"], fixture.job["world_size"], vocabulary=rows), words[begin:]


@pytest.fixture(scope="session")
def twin_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint with the same state as a fixture, in `fully_reshardable`, by stock Megatron's own conversion."""
    made = {"p01": fixture_named("p04").run}

    def twin(name: str) -> Path:
        if name not in made:
            layout, flags = own_flags(fixture_named(name))
            folder = tmp_path_factory.mktemp(f"twin_{name}")
            convert = ["--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", str(folder / "twin")]
            more = [*flags, *convert, "--dist-ckpt-optim-fully-reshardable"]
            load = fixture_named(name).run
            finished(folder, layout, run_job(folder, layout, load=load, more=more, environment=OFF, **checkout_job()))
            made[name] = folder / "twin" / "torch_dist"
        return made[name]

    return twin


@pytest.fixture(scope="session")
def stock_losses(
    twin_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Target], dict[int, float]]:
    """How stock Megatron goes on from the twin; fixtures with the same state share the run."""
    made: dict[tuple[str, str], dict[int, float]] = {}

    def losses(target: Target) -> dict[int, float]:
        state = target.listed_in or target.fixture
        if (state, target.label) not in made:
            folder = tmp_path_factory.mktemp(f"stock_{state}_{target.label}")
            options = {"until": LAST, "more": target.flags, "environment": OFF, **checkout_job()}
            job = resume(folder, target.layout, twin_of(state), **options)
            assert_holds_the_truth(job, target.source)
            made[state, target.label] = job.losses
        return made[state, target.label]

    return losses


def assert_holds_the_truth(job: Job, source: Fixture) -> None:
    """The live optimizer after loading is what the job that wrote the checkpoint held, padding aside."""
    found = with_vocabulary(assemble(job.at_load), TOKENS)
    assert differing(with_vocabulary(source.truth, TOKENS), found) == []


@only_for("0.16")
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_the_plugin_goes_on_exactly_as_stock_does_from_the_twin(
    target: Target, stock_losses: Callable[[Target], dict[int, float]], tmp_path: Path
) -> None:
    legacy = LEGACY if target.fixture == "p08b" else []
    options = {"until": LAST, "more": [*target.flags, *legacy], **checkout_job()}
    plugin = resume(tmp_path, target.layout, target.source.run, **options)
    assert_holds_the_truth(plugin, target.source)
    if target.fixture != "p04":  # which stock loads itself, and the plugin only proves
        assert plugin.summary["format"] == FORMATS.get(target.fixture, "dp_reshardable")

    assert list(plugin.losses) == [5, 6, 7, 8]
    assert plugin.losses == stock_losses(target)
    recorded = {int(iteration): values["loss"]["lm loss"] for iteration, values in target.entry["losses"].items()}
    assert plugin.losses == pytest.approx(recorded, rel=1e-4)


@only_for("0.16")
@pytest.mark.parametrize("target", EXPERTS, ids=str)
def test_experts_go_on_as_recorded(target: Target, tmp_path: Path) -> None:
    """By the losses that the fixture's own machine recorded: of stock under that layout, else of the job that saved.

    Stock has no way to one expert-parallel rank (`KeyError: 'optimizer'`), so nothing is recorded of it there; the
    uninterrupted job went on with what a correct reshard goes on with.
    """
    source, entry = target.source, target.entry
    job = resume(tmp_path, target.layout, source.run, until=LAST, more=target.flags, **checkout_job())
    assert_holds_the_truth(job, source)
    if entry["rc"] == 0:
        recorded = {int(iteration): values["loss"]["lm loss"] for iteration, values in entry["losses"].items()}
    else:
        recorded = {
            values["iteration"]: values["loss"]["lm loss"]
            for values in source.job["losses"]
            if values["iteration"] > SAVED
        }
    assert sorted(recorded) == [5, 6, 7, 8]
    assert job.losses == pytest.approx(recorded, rel=1e-4)


@only_for("0.16")
def test_stock_refuses_what_the_plugin_resumes(tmp_path: Path) -> None:
    target = Target("p01", "tp2pp2")
    result = run_job(tmp_path, target.layout, load=target.source.run, environment=OFF, **checkout_job())
    assert result.returncode != 0
    assert "(TP, PP) mismatch after resume ((2, 2) vs (1, 4) from checkpoint)" in result.output


@only_for("0.16")
def test_an_earlier_megatron_resumes_what_a_later_one_wrote(tmp_path: Path) -> None:
    """0.19 writes the common state as an object of the index, 0.16 requires the file `common.pt`."""
    source = fixture_named("p10")
    stock = run_job(tmp_path / "stock", Layout(1, 4, 8), load=source.run, environment=OFF, **checkout_job())
    assert "has no attribute 'iterdir'" in stock.output
    resumed = resume(
        tmp_path / "resumed", Layout(2, 2, 4), source.run, more=["--use-checkpoint-args"], **checkout_job()
    )
    assert_holds_the_truth(resumed, source)


@only_for("0.16")
def test_a_legacy_checkpoint_carries_the_gradient_scaler(tmp_path: Path) -> None:
    """In the legacy files the scale is a tensor among the weights."""
    fp16 = ["--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "3"]
    options = {"precision": fp16, "more": LEGACY, **checkout_job()}
    saved = train_and_save(tmp_path / "saved", Layout(1, 2, 4), **options)
    resumed = resume(tmp_path / "resumed", Layout(2, 1, 2), saved.run, **options)
    (scaler,) = training_state(resumed.at_load)["grad_scalers"]
    assert (float(scaler["scale"]), scaler["growth_tracker"]) == (2048, 1)
    assert_same_optimizer(saved.at_save, resumed.at_load)
    assert_same_training_state(saved.at_save, resumed.at_load)


@only_for("0.19")
@pytest.mark.parametrize("layout", [Layout(2, 2, 8), Layout(1, 1, 2)], ids=str)
def test_0190_resumes_its_own_checkpoint_with_every_element(layout: Layout, tmp_path: Path) -> None:
    source = fixture_named("p10")
    resumed = resume(tmp_path, layout, source.run, **checkout_job())
    assert_holds_the_truth(resumed, source)
    assert resumed.summary["format"] == "dp_reshardable"
    assert list(resumed.losses) == [SAVED + 1]


# Written by 0.8.0 to 0.19.0; what makes the model of each.
EARLIER = {"p01": [], "p02": LLAMA, "p03": [], "p05": [], "p06": [], "p09": experts(1, *SEQUENCE), "p10": []}


@only_for("0.20")
@pytest.mark.parametrize("fixture", EARLIER)
def test_the_development_head_resumes_what_earlier_releases_wrote(fixture: str, tmp_path: Path) -> None:
    """Megatron-LM's main branch of 22 August 2026, which calls itself 0.20.0."""
    source = fixture_named(fixture)
    layout = Layout(2, 1, 2, vocabulary=source.job["vocab"]["padded_vocab_size"])
    resumed = resume(tmp_path, layout, source.run, more=EARLIER[fixture], **checkout_job())
    assert_holds_the_truth(resumed, source)
    assert resumed.summary["target"].startswith("TP2 x PP1")
    assert list(resumed.losses) == [SAVED + 1]


@only_for("0.16", "0.19", "0.20")
def test_the_flags_of_existing_scripts_save_in_the_background(folder: Path) -> None:
    """`--use-dist-ckpt --async-save`, nothing else: training goes on, and the checkpoint is the synchronous one."""
    held = run_held(folder / "held", **checkout_job())
    assert held.returncode == 0, held.output[-6000:]
    assert_trained_meanwhile(held.output)
    assert sorted(durable_lines(held.output)) == [4, 8, 12]
    synchronous = run_saving(folder / "synchronous", 12, interval=4, more=["--use-dist-ckpt"], **checkout_job())
    assert synchronous.returncode == 0, synchronous.output[-6000:]
    for iteration in (4, 8):
        name = f"iter_{iteration:07d}"
        found = compare(*(folder / job / "checkpoints" / name for job in ("held", "synchronous")))
        assert found.equal, found
