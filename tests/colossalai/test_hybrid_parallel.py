"""Test HybridParallelPlugin: exact resumes under every layout, with files that stock ColossalAI loads."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai_on_cpu import ranks
from safetensors import safe_open

from mcore_ckpt_ext import HuggingFace, convert, inspect, verify
from mcore_ckpt_ext import zero_strict_state_dict as strict
from tests.colossalai.boosted import batch, train
from tests.colossalai.jobs import bits, refusal, same_bits
from tests.colossalai.models import VOCABULARY, Versioned, gpt2

PLUGIN = ("hybrid_parallel",)
BEFORE, MORE = range(2), range(2, 5)
EVEN = 128
# Tensor parallelism, pipeline stages, ZeRO stage, precision, vocabulary, sharded files.
OF_TWO = (
    (2, 1, 0, "bf16", VOCABULARY, True),
    (2, 1, 0, "fp16", EVEN, False),
    (1, 1, 1, "bf16", VOCABULARY, True),
    (1, 1, 2, "fp16", VOCABULARY, False),
    (1, 2, 0, "bf16", VOCABULARY, True),
    (1, 2, 0, "fp32", VOCABULARY, False),
)


def _boost(
    tensor_parallel: int, stages: int, zero: int, precision: str = "bf16", vocabulary: int = VOCABULARY, seed: int = 0,
    build: Any = gpt2, make_optimizer: Any = None, lora: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    import colossalai.logging
    from colossalai.booster import Booster
    from colossalai.booster.plugin import HybridParallelPlugin
    from colossalai.nn.optimizer import HybridAdam

    colossalai.logging.disable_existing_loggers(["colossalai"])
    torch.manual_seed(seed)
    module = build(vocabulary)
    plugin = HybridParallelPlugin(
        tp_size=tensor_parallel, pp_size=stages, zero_stage=zero, precision=precision, initial_scale=128,
        num_microbatches=2 if stages > 1 else None,
    )  # fmt: skip
    booster = Booster(plugin=plugin)
    module = booster.enable_lora(module, lora_config=lora) if lora else module
    model, optimizer, *_ = booster.boost(module, (make_optimizer or partial(HybridAdam, lr=1e-2))(module.parameters()))
    return booster, model, optimizer


def _train(booster: Any, model: Any, optimizer: Any, steps: range) -> list[float | None]:
    """The losses of some steps; with pipeline stages the last one knows them."""
    if booster.plugin.pp_size == 1:
        return train(booster, model, optimizer, steps)
    losses: list[float | None] = []
    for step in steps:
        out = booster.execute_pipeline(iter([batch(step)]), model, lambda output, _: output.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(None if out["loss"] is None else out["loss"].item())
    return losses


def _save(folder: Path, shard: bool, booster: Any, model: Any, optimizer: Any) -> None:
    folder.mkdir(exist_ok=True)
    ending = "" if shard else ".bin"
    booster.save_model(model, str(folder / f"model{ending}"), shard=shard, size_per_shard=0.06)
    booster.save_optimizer(optimizer, str(folder / f"optimizer{ending}"), shard=shard, size_per_shard=0.2)
    dist.barrier()


def _load(folder: Path, shard: bool, booster: Any, model: Any, optimizer: Any, optimizer_first: bool = False) -> None:
    ending = "" if shard else ".bin"
    loads = [
        lambda: booster.load_model(model, str(folder / f"model{ending}")),
        lambda: booster.load_optimizer(optimizer, str(folder / f"optimizer{ending}")),
    ]
    for load in reversed(loads) if optimizer_first else loads:
        load()


def test_resumes_exactly_where_stock_does_not(tmp_path: Path) -> None:
    def job() -> None:
        for number, (*layout, precision, vocabulary, shard) in enumerate(OF_TWO):
            folder = tmp_path / str(number)
            strict.install(plugins=PLUGIN)
            booster, model, optimizer = _boost(*layout, precision, vocabulary)
            _train(booster, model, optimizer, BEFORE)
            if precision == "fp16":
                _scaler(optimizer)._scale.fill_(32.0)
            _save(folder, shard, booster, model, optimizer)
            assert all("fp32_param" not in state for state in optimizer.optim.state.values())
            assert "mcore_ckpt_ext" not in optimizer.optim.param_groups[0]
            uninterrupted = _went_on(booster, model, optimizer)
            again = _boost(*layout, precision, vocabulary, seed=1)
            _load(folder, shard, *again, optimizer_first=number % 2 == 0)
            assert precision != "fp16" or _scaler(again[2]).scale.item() == 32.0
            assert _went_on(*again) == uninterrupted, layout
            strict.uninstall()
            # The negative control, which shows as well that stock loads the files, but with a padded vocabulary under
            # tensor parallelism, of which it asserts that there is none; in fp32 there are no masters to forget.
            stock = _boost(*layout, precision, vocabulary, seed=1)
            if layout[0] > 1 and vocabulary != EVEN:
                assert "AssertionError" in refusal(partial(_load, folder, shard, *stock)), layout
            elif precision != "fp32":
                _load(folder, shard, *stock)
                assert _went_on(*stock) != uninterrupted, layout

    ranks.run(2, job, timeout=300)


def _went_on(booster: Any, model: Any, optimizer: Any) -> tuple[list[float | None], list[list[int]]]:
    """The losses of some more steps, which bf16 rounds, and what is then stepped, in bits."""
    losses = _train(booster, model, optimizer, MORE)
    return losses, [bits(stepped).tolist() for group in optimizer.optim.param_groups for stepped in group["params"]]


def _scaler(optimizer: Any) -> Any:
    return (getattr(optimizer, "mixed_precision", None) or optimizer.mixed_precision_mixin).grad_scaler


def _assert_same_states(there: dict[str, Any], states: dict[str, Any]) -> None:
    assert sorted(there) == sorted(states)
    for key, state in states.items():
        assert sorted(there[key]) == sorted(state)
        for name in state:
            assert same_bits({"": torch.as_tensor(there[key][name])}, {"": torch.as_tensor(state[name])}), name


def test_the_same_state_under_all_layouts(tmp_path: Path) -> None:
    def begin() -> None:
        strict.install(plugins=PLUGIN)
        booster, model, optimizer = _boost(1, 1, 0)
        _train(booster, model, optimizer, BEFORE)
        # What is loaded then has to lie as the weights do, which ColossalAI cuts itself. The loss of this model does
        # not see the rows that fill up the vocabulary, so these are made up.
        for master, state in optimizer.optim.state.items():
            weight = optimizer.master_to_working_map[master]
            if hasattr(weight, "_padding_dim"):
                for values in (weight.data, master):
                    values[weight._origin_length :] = 0.25
            state["exp_avg"].copy_(master)
        _save(tmp_path / "1", True, booster, model, optimizer)
        states = _states(tmp_path / "1")
        masters = [master for group in optimizer.optim.param_groups for master in group["params"]]
        for key, master in enumerate(masters):
            stored = states[str(key)]["fp32_param"]
            assert torch.equal(stored, master[: len(stored)])

    def go_on() -> None:
        strict.install(plugins=PLUGIN)
        layouts = ((2, 2, 0), (2, 1, 1), (1, 2, 1), (1, 1, 2))
        for number, layout in enumerate(layouts, 1):
            booster, model, optimizer = _boost(*layout, seed=number)
            _load(tmp_path / str(number), number < 3, booster, model, optimizer)
            _lies_as_the_weights(optimizer)
            _save(tmp_path / str(number + 1), number < 2, booster, model, optimizer)

    ranks.run(1, begin)
    ranks.run(4, go_on, timeout=300)
    model, states = _model(tmp_path / "1"), _states(tmp_path / "1")
    assert states["0"]["exp_avg_padding"].eq(0.25).all()
    for number in (2, 3, 4, 5):
        _assert_same_states(_states(tmp_path / str(number)), states)
        here = _model(tmp_path / str(number))
        assert sorted(here) == sorted(model)
        assert all(same_bits({"": here[name]}, {"": model[name]}) for name in model)
    # Tied, and there under both names, as in the module.
    assert set(model) == set(gpt2().state_dict())
    assert torch.equal(model["lm_head.weight"], model["transformer.wte.weight"])
    _is_read_without_a_job(tmp_path / "2", tmp_path / "hf", model, states)


def _is_read_without_a_job(folder: Path, destination: Path, model: dict[str, Any], states: dict[str, Any]) -> None:
    """The files of two pipeline stages, each with its own of a tied parameter."""
    assert inspect(folder).format == "colossalai"
    assert verify(folder).sound
    report = convert(folder, destination, HuggingFace())
    keys = {f"{kind} of parameter {number}" for number, state in states.items() for kind in state}
    assert keys | {"optimizer/pytorch_optim_group.bin"} == {item.key for item in report.unread}
    with safe_open(destination / "model.safetensors", framework="pt") as opened:
        assert all(torch.equal(opened.get_tensor(name), model[name]) for name in opened.keys())  # noqa: SIM118 - no dict
        assert set(model) - set(opened.keys()) == {"lm_head.weight"}


def _lies_as_the_weights(optimizer: Any) -> None:
    working = optimizer.get_master_to_working_map()
    for group in optimizer.optim.param_groups:
        for master in group["params"]:
            weight = working[id(master)].detach()
            if master.shape != weight.shape:
                flat = weight.reshape(-1)
                flat = torch.nn.functional.pad(flat, [0, -len(flat) % dist.get_world_size(optimizer.model.dp_group)])
                weight = flat.view(-1, len(master))[dist.get_rank(optimizer.model.dp_group)]
            assert torch.equal(optimizer.optim.state[master]["exp_avg"].to(weight.dtype), weight)
            assert torch.equal(master.to(weight.dtype), weight)


def _states(folder: Path) -> dict[str, dict[str, Any]]:
    if (folder / "optimizer.bin").exists():
        states = torch.load(folder / "optimizer.bin", weights_only=True)["state"]
        return {str(key): state for key, state in states.items()}
    return _indexed(folder / "optimizer" / "pytorch_optim.bin.index.json")


def _model(folder: Path) -> Any:
    if (folder / "model.bin").exists():
        return torch.load(folder / "model.bin", weights_only=True)
    return _indexed(folder / "model" / "pytorch_model.bin.index.json")


def _indexed(index: Path) -> dict[str, Any]:
    places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    files = {file: torch.load(index.parent / file, weights_only=True) for file in set(places.values())}
    return {key: files[file][key] if key in files[file] else files[file][int(key)] for key, file in places.items()}


@pytest.mark.parametrize("shard", [True, False])
def test_resumes_with_lora(tmp_path: Path, shard: bool) -> None:
    def job() -> None:
        from peft import LoraConfig

        strict.install(plugins=PLUGIN)
        boost = partial(_boost, 1, 1, 0, lora=LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"]))
        booster, model, optimizer = boost(vocabulary=EVEN)
        _train(booster, model, optimizer, BEFORE)
        _save(tmp_path, shard, booster, model, optimizer)
        again = boost(vocabulary=EVEN, seed=1)
        _load(tmp_path, shard, *again)
        assert _train(*again, MORE) == _train(booster, model, optimizer, MORE)

    ranks.run(2, job)


@pytest.mark.parametrize(("tensor_parallel", "zero"), [(2, 0), pytest.param(1, 1, marks=pytest.mark.nightly)])
def test_optimizers_with_states_of_other_shapes(tmp_path: Path, tensor_parallel: int, zero: int) -> None:
    def job() -> None:
        from colossalai.nn.optimizer import CAME

        strict.install(plugins=PLUGIN)
        for kind in (torch.optim.NAdam, torch.optim.Adagrad):
            folder = tmp_path / kind.__name__
            boost = partial(_boost, tensor_parallel, 1, zero, make_optimizer=partial(kind, lr=1e-2))
            booster, model, optimizer = boost()
            _train(booster, model, optimizer, BEFORE)
            _save(folder, True, booster, model, optimizer)
            assert kind is not torch.optim.NAdam or _states(folder)["0"]["mu_product"].shape == ()
            again = boost(seed=1)
            _load(folder, True, *again)
            assert _went_on(*again) == _went_on(booster, model, optimizer)
        booster, model, optimizer = _boost(tensor_parallel, 1, zero, make_optimizer=partial(CAME, lr=1e-3))
        _train(booster, model, optimizer, BEFORE)
        text = refusal(partial(_save, folder, True, booster, model, optimizer))
        assert "DistributedCAME has a state of another shape" in text, text
        assert "exp_avg_sq_row of parameter 0" in text, text

    ranks.run(2, job)


def _shares_a_module(vocabulary: int) -> Any:
    module = gpt2(vocabulary)
    module.one = module.two = Versioned()
    return module


def test_hooks_and_modules_under_two_names(tmp_path: Path) -> None:
    def job() -> None:
        strict.install(plugins=PLUGIN)
        for tensor_parallel in (1, 2):
            folder = tmp_path / str(tensor_parallel)
            booster, model, optimizer = _boost(tensor_parallel, 1, 0, build=_shares_a_module)
            _save(folder, False, booster, model, optimizer)
            state = _model(folder)
            plain = _shares_a_module(VOCABULARY)
            expected = plain.state_dict()
            assert list(state) == list(expected)
            assert state._metadata == expected._metadata
            plain.load_state_dict(state)
            other, again, _ = _boost(tensor_parallel, 1, 0, build=_shares_a_module, seed=1)
            again.unwrap().one.seen = 9
            other.load_model(again, str(folder / "model.bin"), strict=True)
            assert all(map(torch.equal, again.unwrap().parameters(), model.unwrap().parameters()))
            assert again.unwrap().two.seen == 3
            load = partial(other.load_model, strict=True)
            without, more = copy.copy(state), copy.copy(state)  # with their versions
            del without["two._extra_state"]
            more["three._extra_state"] = {"seen": 1}
            for text, content in {"Missing key": without, "Unexpected key": more}.items():
                told = refusal(partial(_from_file, folder, content, load, again))
                assert f"{text}(s) in state_dict: " in told and told.count('"') == 2, told

    ranks.run(2, job)


def test_a_mismatched_state_is_refused_by_all_ranks_and_changes_nothing(tmp_path: Path) -> None:
    def job() -> None:
        strict.install(plugins=PLUGIN)
        booster, model, optimizer = _boost(1, 2, 0)
        _train(booster, model, optimizer, range(1))
        _save(tmp_path, False, booster, model, optimizer)
        whole, state = _model(tmp_path), torch.load(tmp_path / "optimizer.bin", weights_only=True)
        before = [parameter.clone() for parameter in model.unwrap().parameters()]
        cases = {
            "Missing key": {name: value for name, value in whole.items() if "ln_f" not in name},
            "Unexpected key": whole | {"more": torch.ones(1)},
            "size mismatch": whole | {"transformer.wpe.weight": torch.ones(3)},
        }
        for text, content in cases.items():
            told = refusal(lambda content=content: _from_file(tmp_path, content, booster.load_model, model))
            assert told.startswith("StateDictMismatchError") and text in told, told
        # A tied parameter may come under any of its names, to the stage that knows it by the other.
        tied = {name: value + 1 for name, value in whole.items() if name != "lm_head.weight"}
        assert all(map(torch.equal, model.unwrap().parameters(), before))
        _from_file(tmp_path, tied, booster.load_model, model)
        assert all(torch.equal(a, b + 1) for a, b in zip(_real(model), _real_of(before, model), strict=True))
        state["state"][3]["exp_avg"] = torch.ones(3)
        moments = [dict(one) for one in optimizer.optim.state.values()]
        told = refusal(lambda: _from_file(tmp_path, state, booster.load_optimizer, optimizer))
        assert "exp_avg of parameter 3" in told, told
        for one, kept in zip(optimizer.optim.state.values(), moments, strict=True):
            assert torch.equal(one["exp_avg"], kept["exp_avg"])

    ranks.run(2, job)


def _real(model: Any) -> list[torch.Tensor]:
    return _real_of(list(model.unwrap().parameters()), model)


def _real_of(values: list[torch.Tensor], model: Any) -> list[torch.Tensor]:
    """Values of the parameters without the rows of their padding."""
    pairs = zip(values, model.unwrap().parameters(), strict=True)
    return [value[: getattr(p, "_origin_length", len(p))] for value, p in pairs]


def _from_file(folder: Path, content: Any, load: Any, into: Any) -> None:
    file = folder / "case.bin"
    if dist.get_rank() == 0:
        torch.save(content, file)
    dist.barrier()
    try:
        load(into, str(file))
    finally:
        dist.barrier()


@pytest.mark.parametrize("name", ["gemini", "low_level_zero"])
def test_other_plugins_are_left_alone(name: str) -> None:
    from colossalai.checkpoint_io import HybridParallelCheckpointIO

    before = dict(vars(HybridParallelCheckpointIO))
    try:
        strict.install(plugins=(name,))
        assert dict(vars(HybridParallelCheckpointIO)) == before
        strict.install(plugins=PLUGIN)
        assert dict(vars(HybridParallelCheckpointIO)) != before
    finally:
        strict.uninstall()
    assert dict(vars(HybridParallelCheckpointIO)) == before
