"""Test jobs of genuine Megatron-LM 0.19.2 with --use-precision-aware-optimizer, under several layouts.

The fused optimizer keeps masters as the int16 that bf16 weights lack. Stock does not check if the option is switched on
or off: torch's loader silently copies remainders into fp32 masters, and masters into remainders. All jobs are one
launch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import assemble
from megatron_on_cpu.precision_aware import REMAINDERS_VARIABLE, split

from mcore_ckpt_ext import Canonical, convert, open_checkpoint, verify
from mcore_ckpt_ext.layout.additive_digest import digest_tensor, parse_digest
from mcore_ckpt_ext.layout.sidecar import FILE_NAME as SIDECAR_FILE
from mcore_ckpt_ext.layout.sidecar import Sidecar
from mcore_ckpt_ext.model_space.tensors import PARAM_REMAINDER
from mcore_ckpt_ext.operations.comparison import compare
from tests.harness.checkouts import EITHER
from tests.harness.checkpoints import assert_converted
from tests.harness.jobs import (
    LAST,
    LEGACY,
    RANK_SCRIPTS,
    SAVED,
    SEEDED,
    Job,
    assert_same_training_state,
    differing,
    run_job,
    train_and_save,
)
from tests.harness.layouts import Layout
from tests.harness.models import LLAMA
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

LAYOUT = Layout(1, 2, 4)
OTHER = Layout(2, 1, 4)
AWARE = [*LLAMA, "--use-precision-aware-optimizer"]
REDUCED = [*AWARE, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "fp16"]
# Masters and moments of few bits, divided by a scale of each shard.
HALF = [*AWARE, "--main-params-dtype", "fp16", "--exp-avg-dtype", "fp16", "--exp-avg-sq-dtype", "bf16"]
WHOLE = {REMAINDERS_VARIABLE: "0"}
MIXED = {"TEST_NORMS_IN_FP32": "1"}
MIXED_FORMATS = {"buffers": [], "arrays": ["--dist-ckpt-optim-fully-reshardable"], "files": LEGACY}


@pytest.fixture(scope="module", params=EITHER)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Three jobs that save, trained to the end, so that what comes after the checkpoint is known; and who resumes.

    Among the masters of plain Adam are such at exactly half of a step of bf16, whose remainder belongs to the weight
    above.
    """
    folder = tmp_path_factory.mktemp("aware")
    remainders, masters, half, fp32, legacy = (
        folder / name / "checkpoints" for name in ("remainders", "masters", "half", "fp32", "legacy")
    )
    turns = [
        Turn(folder / "remainders", LAYOUT, more=AWARE, saves=True, until=LAST),
        Turn(folder / "masters", LAYOUT, more=LLAMA, saves=True, until=LAST),
        Turn(folder / "half", LAYOUT, more=HALF, saves=True, until=LAST),
        Turn(folder / "fp32", LAYOUT, more=AWARE, precision=(), saves=True, until=LAST),
        Turn(folder / "legacy", LAYOUT, more=[*AWARE, *LEGACY], saves=True, until=LAST),
        Turn(folder / "stock", LAYOUT, more=LLAMA, load=remainders, stock=True),
        Turn(folder / "stock's own", LAYOUT, more=AWARE, load=remainders, until=LAST),
        Turn(folder / "remainders, TP2", OTHER, more=AWARE, load=remainders, until=LAST),
        Turn(folder / "whole masters, TP1 x PP1", Layout(1, 1, 4), more=AWARE, load=remainders, environment=WHOLE,
             until=LAST),
        Turn(folder / "off, TP2 x PP2", Layout(2, 2, 4), more=LLAMA, load=remainders, until=LAST),
        Turn(folder / "off, same layout", LAYOUT, more=LLAMA, load=remainders, until=LAST),
        Turn(folder / "on, same layout", LAYOUT, more=AWARE, load=masters, until=LAST),
        Turn(folder / "on, TP2", OTHER, more=AWARE, load=masters, until=LAST),
        Turn(folder / "reduced, same layout", LAYOUT, more=REDUCED, load=remainders),
        Turn(folder / "reduced", OTHER, more=REDUCED, load=masters, environment=WHOLE),
        Turn(folder / "half, same layout", LAYOUT, more=HALF, load=half, until=LAST),
        Turn(folder / "half, TP2", OTHER, more=HALF, load=half, until=LAST),
        Turn(folder / "half, off, TP2", OTHER, more=LLAMA, load=half, until=LAST),
        Turn(folder / "legacy, same layout", LAYOUT, more=[*AWARE, *LEGACY], load=legacy, until=LAST),
        Turn(folder / "legacy, TP2", OTHER, more=AWARE, load=legacy, until=LAST),
        Turn(folder / "fp32, TP2", OTHER, more=AWARE, precision=(), load=fp32, until=LAST),
        Turn(folder / "fp32, off, same layout", LAYOUT, more=LLAMA, precision=(), load=fp32, until=LAST),
        *(turn for name, stored in MIXED_FORMATS.items() for turn in mixed_turns(folder, name, stored)),
    ]  # fmt: skip
    return run_in_turn(
        folder, turns, [launch.PRECISION_AWARE, RANK_SCRIPTS / "norms_in_fp32.py"], of_checkout=request.param
    )


def mixed_turns(folder: Path, name: str, stored: list[str]) -> list[Turn]:
    """A job whose norms stay in fp32, and who resumes it with that optimizer and without."""
    run = folder / f"mixed {name}" / "checkpoints"
    return [
        Turn(folder / f"mixed {name}", LAYOUT, more=[*AWARE, *stored], environment=MIXED, saves=True, until=LAST),
        Turn(folder / f"mixed {name}, TP2", OTHER, more=AWARE, environment=MIXED, load=run, until=LAST),
        Turn(folder / f"mixed {name}, off", OTHER, more=LLAMA, environment=MIXED, load=run, until=LAST),
    ]


@pytest.fixture(scope="module")
def remainders(results: Results) -> Job:
    return results.job("remainders")


@pytest.fixture(scope="module")
def masters(results: Results) -> Job:
    return results.job("masters")


def test_stock_takes_remainders_for_masters(results: Results) -> None:
    """Why the package takes this load over although the layout is the same."""
    stock = results["stock"]
    assert "successfully loaded checkpoint" in stock.output
    assert "[mcore_ckpt_ext]" not in stock.output
    loaded = assemble(results.folder("stock") / "dump" / "after_load")
    assert loaded["fp32_param.output_layer.weight"].abs().max() > 1000


def test_under_the_same_layout_stock_resumes_what_it_wrote(remainders: Job, results: Results) -> None:
    assert_exactly_goes_on(remainders, "stock's own", results)


def assert_exactly_goes_on(saved: Job, name: str, results: Results) -> None:
    """By stock, where it can: up to 0.16 it cannot load what it wrote."""
    resumed = results.job(name)
    assert resumed.losses == {number: loss for number, loss in saved.losses.items() if number > SAVED}
    assert any("optimizer resumed" in line for line in resumed.said) == (results.megatron == "0.16")


@pytest.mark.parametrize("name", ["remainders, TP2", "whole masters, TP1 x PP1", "off, TP2 x PP2", "off, same layout"])
def test_remainders_under_another_layout_and_as_masters(remainders: Job, results: Results, name: str) -> None:
    resumed = results.job(name)
    assert_same_masters_and_moments(remainders, resumed)
    assert "joined from their weights and remainders" in resumed.output
    assert_losses_go_on(remainders, resumed)


@pytest.mark.parametrize("name", ["on, same layout", "on, TP2"])
def test_masters_become_remainders(masters: Job, results: Results, name: str) -> None:
    resumed = results.job(name)
    assert_same_masters_and_moments(masters, resumed)
    found = assemble(resumed.at_load)
    for key, master in found.items():
        if key.startswith("fp32_param."):
            weight = found[key.replace("fp32_param.", "weight.")]
            assert torch.equal(split(master.reshape(-1))[0].view(torch.int16), weight.reshape(-1).view(torch.int16))
    assert_losses_go_on(masters, resumed)


REDUCED_WORDS = "rounded, because this job keeps them so: first moments to bf16, second moments to fp16"


def test_what_stock_rounds_is_said(results: Results) -> None:
    """Its casts have no message."""
    said = results.job("reduced, same layout").said
    if results.megatron == "0.16":  # whose own load fails
        assert REDUCED_WORDS in said[0]
    else:
        assert [line.partition("] [mcore_ckpt_ext] ")[2] for line in said] == [REDUCED_WORDS]
    assert results.job("stock's own").said == [] or results.megatron == "0.16"


def test_reduced_moments_take_the_nearest_numbers_of_their_dtype(masters: Job, results: Results) -> None:
    assert f"; {REDUCED_WORDS};" in results.job("reduced").output
    expected, found = assemble(masters.at_save), assemble(results.job("reduced").at_load)
    kinds = {"exp_avg.": 2**-8, "exp_avg_sq.": 2**-10}
    for name, values in expected.items():
        for kind, step in kinds.items():
            if name.startswith(kind):
                assert not torch.equal(found[name], values)
                torch.testing.assert_close(found[name], values, rtol=step, atol=float(values.abs().max()) * 2**-14)
    kept = [name for name in expected if name.startswith(("weight.", "fp32_param."))]
    assert differing({name: expected[name] for name in kept}, {name: found[name] for name in kept}) == []


def test_masters_of_half_precision_are_verified_to_be_near(results: Results, tmp_path: Path) -> None:
    """The fp32 numbers on the disk are those that fp16 could hold, which are not those that were rounded to weights."""
    saved, off = results.job("half"), results.job("half, off, TP2")
    truth = assemble(saved.at_save)
    assert differing(truth, assemble(off.at_load)) == []
    for resumed in (off, results.job("half, TP2")):
        assert "parameters verified within fp16 rounding of their weights" in resumed.output
        assert_same_training_state(saved.at_save, resumed.at_load)
        assert_losses_go_on(saved, resumed)
    found = assemble(results.job("half, TP2").at_load)  # other shards have other scales
    assert "keeps them so: masters to fp16, first moments to fp16;" in results.job("half, TP2").output
    for name, values in truth.items():
        torch.testing.assert_close(found[name], values, rtol=2**-7, atol=float(values.abs().max()) * 2**-24)
    assert_exactly_goes_on(saved, "half, same layout", results)
    verification = verify(saved.run)
    assert verification.sound
    assert any("within fp16 rounding of their weights" in check.extent for check in verification.checks)
    assert_converted(saved.run, truth, tmp_path)


@pytest.mark.parametrize("name", ["legacy, same layout", "legacy, TP2"])
def test_remainders_that_were_gathered_as_numbers(results: Results, name: str) -> None:
    """Stock cannot load what it wrote: FusedAdam refuses fp32 numbers in place of int16 remainders."""
    saved, resumed = results.job("legacy"), results.job(name)
    assert_same_masters_and_moments(saved, resumed)
    assert "joined from their weights and remainders" in resumed.output
    assert SEEDED in resumed.output
    assert_losses_go_on(saved, resumed)


def test_a_checkpoint_with_remainders_as_numbers_is_sound(results: Results, tmp_path: Path) -> None:
    saved = results.job("legacy")
    assert verify(saved.run).sound
    found = compare(saved.run, convert(saved.run, tmp_path / "out", Canonical()).destination)
    assert found.equal


def test_fp32_weights_are_their_own_masters(results: Results, tmp_path: Path) -> None:
    """The stored masters are those of the start: the fused optimizer steps fp32 weights themselves."""
    saved = results.job("fp32")
    truth = assemble(saved.at_save)
    for name in ("fp32, TP2", "fp32, off, same layout"):
        resumed = results.job(name)
        assert differing(truth, assemble(resumed.at_load)) == []
        assert_same_training_state(saved.at_save, resumed.at_load)
        assert "parameters with fp32 weights as masters" in resumed.output
        assert resumed.losses == pytest.approx({step: saved.losses[step] for step in resumed.losses}, rel=1e-6)
    verification = verify(saved.run)
    assert verification.sound
    assert any("masters that are fp32 weights" in check.extent for check in verification.checks)
    stale = [row.key for row in verification.account.not_looked_at if "never updates" in row.why]
    assert len(stale) == 2  # a bucket of each stage
    assert_converted(saved.run, truth, tmp_path)


@pytest.mark.parametrize("name", MIXED_FORMATS)
def test_masters_of_two_kinds_beside_each_other(results: Results, name: str, tmp_path: Path) -> None:
    """Of bf16 weights the remainders are stored, of fp32 weights copies that no step updates."""
    saved = results.job(f"mixed {name}")
    truth = assemble(saved.at_save)
    assert {truth["weight.decoder.final_layernorm.weight"].dtype, truth["weight.output_layer.weight"].dtype} == {
        torch.float32, torch.bfloat16
    }  # fmt: skip
    for resumed in (results.job(f"mixed {name}, TP2"), results.job(f"mixed {name}, off")):
        assert_same_masters_and_moments(saved, resumed)
        assert_losses_go_on(saved, resumed)
    verification = verify(saved.run)
    assert verification.sound
    assert any("never updates" in row.why for row in verification.account.not_looked_at)
    assert_converted(saved.run, truth, tmp_path)


def test_where_masters_are_remainders_the_sidecar_keeps_digests_of_them(remainders: Job) -> None:
    """What each rank added up while it was alive is what the checkpoint holds, for every parameter."""
    digests = Sidecar.from_json((remainders.iteration / SIDECAR_FILE).read_text()).digests
    checkpoint = open_checkpoint(remainders.iteration)
    recorded = {
        (kind, name): parse_digest(digest)
        for group in digests
        for name, kinds in group.parameters.items()
        for kind, digest in kinds.items()
    }
    stored = {
        (PARAM_REMAINDER, name): digest_tensor(checkpoint.tensor(PARAM_REMAINDER, name).read())
        for name in checkpoint.names(PARAM_REMAINDER)
    }
    assert recorded == stored
    assert len(digests) == 2


@pytest.mark.parametrize("name", ["masters", "half"])
def test_other_jobs_have_none(name: str, results: Results) -> None:
    assert Sidecar.from_json((results.job(name).iteration / SIDECAR_FILE).read_text()).digests == ()


def assert_same_masters_and_moments(saved: Job, resumed: Job) -> None:
    """Bit for bit; of the weights, those that lie halfway between two numbers may have become the other one."""
    expected, found = assemble(saved.at_save), assemble(resumed.at_load)
    assert expected.keys() == found.keys()
    state = [name for name in expected if not name.startswith("weight.")]
    assert differing({name: expected[name] for name in state}, {name: found[name] for name in state}) == []
    assert_same_training_state(saved.at_save, resumed.at_load)


def assert_losses_go_on(saved: Job, resumed: Job) -> None:
    expected = {number: loss for number, loss in saved.losses.items() if number > SAVED}
    assert resumed.losses == pytest.approx(expected, rel=1e-4)


def test_other_frozen_parameters_of_the_same_size(tmp_path: Path) -> None:
    """Stock takes the state of the one layer for that of the other, and beside remainders no proof sees it."""
    layout, plugins = Layout(1, 1, 2), [RANK_SCRIPTS / "freeze.py", launch.PRECISION_AWARE]
    options = {"plugins": plugins, "more": ["--use-precision-aware-optimizer"]}
    saved = train_and_save(tmp_path / "saved", layout, **options)
    fast = {"MCORE_CKPT_EXT_LOAD": "fast"}
    same = run_job(tmp_path / "same", layout, load=saved.run, environment=fast, **options)
    assert same.returncode == 0
    assert "of tensors read" in same.output
    assert "verified" not in same.output
    for environment in ({}, fast):
        other = run_job(
            tmp_path / "other", layout, load=saved.run, environment={**environment, "TEST_FROZEN_LAYER": "1"}, **options
        )
        assert other.returncode != 0
        assert "the model has a parameter that the checkpoint lacks" in other.output
