"""Test every optimizer of Megatron in its checkpoints: every element of every kind is the live job's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext import Canonical, Legacy, TorchDist
from mcore_ckpt_ext.errors import CheckpointError, PackingError, UnreadableCheckpointError
from mcore_ckpt_ext.formats.checkpoint import Checkpoint, open_checkpoint
from mcore_ckpt_ext.formats.parts import Job
from mcore_ckpt_ext.formats.torch_dist.reader import TorchDistCheckpoint
from mcore_ckpt_ext.layout.parameter_order import LOCAL, TRANSFORMER_ENGINE
from mcore_ckpt_ext.megatron.live.param_groups import carried_groups
from mcore_ckpt_ext.model_space.names import Layer
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.findings import MASTERS
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.optimizers.groups import ADAM, LION, MOMENTUM, keeps_nothing, rule_of, rule_that_keeps
from tests.harness.checkpoints import APART, Fixture, everything_in, fixture_named

# Of those apart, what Megatron-LM's own loop wrote in torch_dist.
OTHER_OPTIMIZERS = [name for name in APART if name < "p49"]
REMAINDERS = [name for name in OTHER_OPTIMIZERS if name.startswith("p47")]
ENCODINGS = {
    "p41": "no_distributed_optimizer",
    "p42": "no_distributed_optimizer",
    "p43": "no_distributed_optimizer",
    "p44": "layer_wise",
    "p45": "dp_reshardable",
    "p46": "dp_reshardable",
    "p47": "dp_reshardable",
    "p47b": "fully_reshardable",
    "p48": "dp_reshardable",
}


@pytest.fixture(params=OTHER_OPTIMIZERS)
def fixture(request: pytest.FixtureRequest) -> Fixture:
    return fixture_named(request.param)


def assert_same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    """Bit for bit, and neither a tensor too many nor one too few."""
    assert found.keys() == truth.keys()
    for key, expected in truth.items():
        assert (found[key].dtype, found[key].shape) == (expected.dtype, expected.shape), key
        assert torch.equal(found[key].view(torch.uint8), expected.view(torch.uint8)), key


def test_everything_equals_the_truth(fixture: Fixture) -> None:
    checkpoint = open_checkpoint(fixture.run)
    assert checkpoint.optimizer.format() == ENCODINGS[fixture.folder.name.partition("_")[0]]
    assert_same(everything_in(checkpoint), fixture.truth)


def test_all_are_sound(fixture: Fixture) -> None:
    verification = verify(fixture.run)
    assert verification.findings == ()
    assert any(check.name == MASTERS and check.done for check in verification.checks)


def test_muon_and_adam_share_a_model() -> None:
    """Each parameter has the state of its own optimizer, and no other."""
    for name in ("p43", "p44"):
        checkpoint = open_checkpoint(fixture_named(name).run)
        muon, adam = (set(checkpoint.names(kind)) for kind in ("momentum_buffer", "exp_avg"))
        assert muon and adam and not muon & adam
        assert muon | adam == set(checkpoint.names("fp32_param")) == set(checkpoint.names("weight"))


def without_orders(monkeypatch: pytest.MonkeyPatch, orders: list[object]) -> None:
    monkeypatch.setattr(Job, "orders", lambda self: orders)


def test_remainders_need_a_known_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What masters would show, remainders do not: nothing is taken that the chunk borders do not force."""
    without_orders(monkeypatch, [])
    with pytest.raises(PackingError, match="places of the parameters are not certain"):
        open_checkpoint(fixture_named("p47").run).names("exp_avg")
    without_orders(monkeypatch, [TRANSFORMER_ENGINE])
    with pytest.raises(PackingError, match="no stored chunk does"):
        open_checkpoint(fixture_named("p47").run).names("exp_avg")


def test_remainders_of_a_model_of_the_users_own_are_refused() -> None:
    checkpoint = open_checkpoint(fixture_named("p47").run)
    checkpoint.job.common()["args"].spec = ["own.module", "layers"]
    with pytest.raises(PackingError, match="places of the parameters are not certain"):
        checkpoint.names("exp_avg")


def test_two_orders_within_the_same_borders_are_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two biases of one size could stand either way: whoever does not know which, does not guess."""

    class Exchanged:
        label = "another order"
        order_outside_layers = LOCAL.order_outside_layers

        def order_in_layer(self, layer: Layer, suffixes: list[str]) -> list[str] | None:
            known = LOCAL.order_in_layer(layer, suffixes)
            swap = {"mlp.linear_fc2.bias": "self_attention.linear_proj.bias"}
            swap |= {value: key for key, value in swap.items()}
            return known and [swap.get(suffix, suffix) for suffix in known]

    without_orders(monkeypatch, [LOCAL, Exchanged()])
    with pytest.raises(PackingError, match="places of the parameters are not certain"):
        open_checkpoint(fixture_named("p47").run).names("exp_avg")


def test_sinks_are_registered_before_the_projections() -> None:
    """As a gpt-oss of genuine 0.19.2 has them under either layer spec, whose norm the other one fuses."""
    norm, query = (f"self_attention.linear_qkv.{leaf}" for leaf in ("layer_norm_weight", "weight"))
    sinks, output = (f"self_attention.{module}" for module in ("core_attention.softmax_offset", "linear_proj.weight"))
    for order, measured in ((TRANSFORMER_ENGINE, [sinks, output, norm, query]), (LOCAL, [norm, sinks, output, query])):
        assert order.order_in_layer(Layer("decoder", 0), sorted(measured)) == measured


@pytest.mark.parametrize("name", REMAINDERS)
def test_remainders_without_weights(name: str) -> None:
    checkpoint = open_checkpoint(fixture_named(name).run)
    names = checkpoint.names("fp32_param")
    weights = checkpoint.model.weights()
    hidden = weights.logical_tensor
    weights.logical_tensor = lambda kind, name: None if name == names[0] else hidden(kind, name)  # type: ignore[method-assign]
    with pytest.raises(
        UnreadableCheckpointError, match=f"remainders of bf16 weights, which are missing; found: no weight.*{names[0]}"
    ):
        checkpoint.tensor("fp32_param", names[0]).read()


def test_numbers_that_are_no_remainders(tmp_path: Path) -> None:
    """One number of p47b that no int16 has: whatever it is, it is not taken for a remainder or a master."""
    fixture = fixture_named("p47b").copy_to(tmp_path / "copy")
    checkpoint = open_checkpoint(fixture.run)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    (stored,) = checkpoint.stored_slices("param_remainder", name)
    payload = checkpoint.files.transfer.locate(stored.extent)
    checkpoint.files.reader.close()
    with (fixture.iteration / stored.extent.file).open("r+b") as file:
        file.seek(payload.offset + 4 * 1000)
        file.write(torch.tensor([0.5]).numpy().tobytes())
    checkpoint = open_checkpoint(fixture.run)
    with pytest.raises(CheckpointError, match="neither remainders nor masters.*linear_fc1"):
        checkpoint.tensor("fp32_param", name).read()
    shutil.rmtree(tmp_path / "copy")


# What a conversion writes of a checkpoint: `param_remainder` lives on in whole masters.
def carried(truth: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in truth.items() if not key.startswith("param_remainder.")}


# Muon came with 0.16; the others are written in the formats of their time, of which 0.13 has the older ones.
OLD = {"p43": "0.16", "p44": "0.16"}


@pytest.mark.thorough
def test_converted_to_torch_dist_of_old_and_new_versions_and_back(fixture: Fixture, tmp_path: Path) -> None:
    for version in (OLD.get(fixture.folder.name.partition("_")[0], "0.13"), "0.19"):
        convert(fixture.run, tmp_path / version, TorchDist(megatron_version=version))
        written = open_checkpoint(tmp_path / version)
        assert_same(everything_in(written), carried(fixture.truth))
        assert step_of(written) == step_of(open_checkpoint(fixture.run)) == 4
    assert verify(tmp_path / "0.19").findings == ()


@pytest.mark.thorough
def test_through_canonical_and_back(fixture: Fixture, tmp_path: Path) -> None:
    """What a canonical folder keeps is enough to write what stock Megatron reads: groups, chain and all."""
    convert(fixture.run, tmp_path / "canonical", Canonical())
    assert_same(everything_in(open_checkpoint(tmp_path / "canonical")), carried(fixture.truth))
    for source, name in ((fixture.run, "direct"), (tmp_path / "canonical", "through")):
        convert(source, tmp_path / name, TorchDist(megatron_version="0.16"))
    direct, through = (open_checkpoint(tmp_path / name) for name in ("direct", "through"))
    assert direct.job.common()["optimizer"] == through.job.common()["optimizer"]
    assert direct.job.common()["content_metadata"] == through.job.common()["content_metadata"]
    assert compare(tmp_path / "direct", tmp_path / "through").equal
    assert compare(fixture.run, tmp_path / "through").equal


def step_of(checkpoint: Checkpoint) -> int:
    """The one step of all groups that have one."""
    (step,) = {group["step"] for group in checkpoint.optimizer.param_groups() if "step" in group}
    return int(step)


def test_written_optimizers_keep_their_kind(tmp_path: Path) -> None:
    """Without a distributed optimizer none is written, and each of a chain keeps its own groups."""
    convert(fixture_named("p44").run, tmp_path / "muon", TorchDist(megatron_version="0.19"))
    muon = open_checkpoint(tmp_path / "muon")
    children = muon.job.common()["optimizer"]
    assert [set(child["optimizer"]["param_groups"][0]) & {"momentum", "betas"} for child in children.values()] == [
        {"momentum"},
        {"betas"},
    ]
    assert not muon.job.arguments().use_distributed_optimizer
    assert "distrib_optim_sharding_type" not in muon.job.common()["content_metadata"]
    convert(fixture_named("p42").run, tmp_path / "fp32", TorchDist(megatron_version="0.19"))
    fp32 = open_checkpoint(tmp_path / "fp32")
    assert set(fp32.job.common()["optimizer"]) == {"param_groups"}
    assert not [key for key in fp32.files.index().arrays if "fp32_param" in key]


def test_classes_of_an_offloaded_optimizer_are_not_written(tmp_path: Path) -> None:
    for to, target in (("torch_dist", TorchDist(megatron_version="0.19")), ("legacy", Legacy(megatron_version="0.19"))):
        convert(fixture_named("p46").run, tmp_path / to, target)
        groups = open_checkpoint(tmp_path / to).optimizer.param_groups()
        assert groups and not any("cpu_optimizer_cls" in group for group in groups)
        assert all(group["offload_fraction"] == 0.5 for group in groups)


def test_groups_of_one_model_are_distinguished_by_their_rule() -> None:
    adam, lion = {"betas": (0.9, 0.95), "eps": 1e-8}, {"betas": (0.95, 0.98)}
    muon, sgd, plain = {"momentum": 0.95, "nesterov": True}, {"momentum": 0.9, "dampening": 0}, {"momentum": 0}
    assert list(map(rule_of, (adam, lion, muon, sgd, plain))) == [ADAM, LION, MOMENTUM, MOMENTUM, MOMENTUM]
    kinds = [{"exp_avg", "exp_avg_sq"}, {"exp_avg"}, {"momentum_buffer"}, {"momentum_buffer"}, set()]
    assert list(map(rule_that_keeps, kinds)) == [ADAM, LION, MOMENTUM, MOMENTUM, MOMENTUM]
    assert [keeps_nothing([group]) for group in (adam, lion, muon, sgd, plain)] == [False] * 4 + [True]
    assert not keeps_nothing([])
    one, other = ({"wd_mult": 1.0, "lr_mult": 1.0, **rule, "lr": lr} for rule, lr in ((adam, 0.1), (lion, 0.2)))
    assert [group["lr"] for group in carried_groups([{**other, "lr": 0}], [one, other])] == [0.2]


DESCRIBED = {
    "p41": "Adam",
    "p43": "Muon and Adam",
    "p44": "Muon and Adam",
    "p46": "Adam, offloaded to CPUs by 0.5",
    "p47": "Adam, masters as remainders of bf16 weights",
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_inspect_names_the_optimizers(name: str) -> None:
    assert inspect(fixture_named(name).run).optimizer == DESCRIBED[name]


def test_a_step_that_is_there_twice_and_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = TorchDistCheckpoint._param_groups

    def differing(self: TorchDistCheckpoint) -> list[dict[str, object]]:
        found = groups(self)
        found[-1]["step"] = 3
        return found

    monkeypatch.setattr(TorchDistCheckpoint, "_param_groups", differing)
    fixture = fixture_named("p45")
    says = "step is stored more than once.*found: 3 in parameter group 3; 4 in parameter group 0.*use another iteration"
    with pytest.raises(UnreadableCheckpointError, match=says):
        convert(fixture.run, tmp_path / "out", TorchDist(megatron_version="0.19"))
    assert not (tmp_path / "out").exists()
    assert any("step is stored more than once" in finding.what for finding in verify(fixture.run).findings)


@pytest.mark.thorough
def test_to_legacy_of_another_layout_and_back(fixture: Fixture, tmp_path: Path) -> None:
    tensor = 1 if fixture.job["layout"]["tp"] == 2 else 2
    target = Legacy(megatron_version="0.19", tensor_model_parallel_size=tensor, pipeline_model_parallel_size=1)
    convert(fixture.run, tmp_path / "legacy", target)
    legacy = open_checkpoint(tmp_path / "legacy")
    assert_same(everything_in(legacy), carried(fixture.truth))
    distributed = not open_checkpoint(fixture.run).optimizer.chained_optimizer_settings()
    assert bool(legacy.job.arguments().use_distributed_optimizer) == distributed
    assert legacy.optimizer.format() == ("legacy_torch" if distributed else "legacy_torch_per_parameter")
    assert verify(tmp_path / "legacy", quick=True).findings == ()
    convert(tmp_path / "legacy", tmp_path / "back", TorchDist(megatron_version="0.19"))
    assert compare(fixture.run, tmp_path / "back").equal
    back, source = (open_checkpoint(path) for path in (tmp_path / "back", fixture.run))
    assert len(back.optimizer.chained_optimizer_settings()) == len(source.optimizer.chained_optimizer_settings())
    assert bool(back.job.arguments().use_distributed_optimizer) == distributed
    assert step_of(back) == 4


def test_adam_without_a_distributed_optimizer_stays_without(tmp_path: Path) -> None:
    """Legacy files that Megatron wrote, as well as those from here."""
    convert(fixture_named("p08c").run, tmp_path / "run", TorchDist(megatron_version="0.19"))
    written = open_checkpoint(tmp_path / "run")
    assert written.optimizer.format() == "no_distributed_optimizer"
    assert not written.job.arguments().use_distributed_optimizer
    assert compare(fixture_named("p08c").run, tmp_path / "run").equal


def torch_adam_in_legacy_files(folder: Path, steps: list[float]) -> Path:
    """As torch's Adam has it: a step beside each parameter, and none in the groups."""
    convert(fixture_named("p42").run, folder, Legacy(megatron_version="0.19"))
    for file in folder.glob("iter_*/mp_rank_*/model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        for group in state["optimizer"]["param_groups"]:
            group.pop("step", None)
        for number, kept in state["optimizer"]["state"].items():
            kept["step"] = torch.tensor(steps[number % len(steps)])
        torch.save(state, file)
    return folder


def test_the_step_of_torchs_adam_is_carried_out_of_legacy_files(tmp_path: Path) -> None:
    source = torch_adam_in_legacy_files(tmp_path / "run", [7.0])
    convert(source, tmp_path / "out", TorchDist(megatron_version="0.19"))
    (child,) = open_checkpoint(tmp_path / "out").optimizer.chained_optimizer_settings()
    assert child["state"]["common_step"] == 7
    convert(tmp_path / "out", tmp_path / "back", Legacy(megatron_version="0.19"))
    (file,) = (tmp_path / "back").glob("iter_*/mp_rank_00_000/model_optim_rng.pt")
    state = torch.load(file, weights_only=False)["optimizer"]["state"]
    assert {float(kept["step"]) for kept in state.values()} == {7}


def test_steps_of_parameters_that_differ(tmp_path: Path) -> None:
    source = torch_adam_in_legacy_files(tmp_path / "run", [7.0, 8.0])
    with pytest.raises(UnreadableCheckpointError, match="stored more than once.*7 in parameter 0 of mp_rank_.*; 8 in"):
        convert(source, tmp_path / "out", TorchDist(megatron_version="0.19"))
    assert not (tmp_path / "out").exists()


def test_moments_of_other_parameters_are_not_taken(tmp_path: Path) -> None:
    """In fp32 files only shapes and order tell: with the state of one parameter gone, none is believed."""
    convert(fixture_named("p42").run, tmp_path / "run", Legacy(megatron_version="0.19"))
    (file, *_) = sorted((tmp_path / "run").glob("iter_*/mp_rank_*/model_optim_rng.pt"))
    state = torch.load(file, weights_only=False)
    last = state["optimizer"]["param_groups"][0]["params"].pop()
    del state["optimizer"]["state"][last]
    torch.save(state, file)
    with pytest.raises(PackingError, match="which optimizer state belongs to which weight; found: state of 1"):
        open_checkpoint(tmp_path / "run").names("exp_avg")
