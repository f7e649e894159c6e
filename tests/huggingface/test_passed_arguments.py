"""Test arguments that a user passes although the checkpoint stores them, in every command that takes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.families.passed_arguments import replaced_values, with_passed
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.storage.dtypes import dtype_named
from tests.harness.checkpoints import fixture_named

REPLACED = "note: seq_length is 64, as passed; the checkpoint stores 32"
REHEARSED = ("--rehearse", "tp=2", "pp=2")


@pytest.mark.parametrize("rehearsed", [(), REHEARSED])
def test_a_plan_says_which_stored_value_it_does_not_use(
    rehearsed: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(fixture_named("p02").run), "--gpus", "4", *rehearsed, "--argument"]
    assert main([*words, "seq_length=64", "micro_batch_size=1"]) == 0
    shown = capsys.readouterr().out
    assert REPLACED in shown
    assert "micro_batch_size is" not in shown, "it is the stored value"


@pytest.mark.parametrize("rehearsed", [(), REHEARSED])
def test_the_stored_layout_is_not_replaced(rehearsed: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The content of gradient buffers is found by it."""
    words = ["plan", str(fixture_named("p02").run), "--gpus", "4", *rehearsed, "--argument"]
    assert main([*words, "tensor_model_parallel_size=1"]) == 2
    shown = capsys.readouterr().err
    assert "contradicts the layout of the job that wrote the checkpoint" in shown
    assert "2, as the checkpoint stores it" in shown
    assert main([*words, "tensor_model_parallel_size=2"]) == 0


def test_a_conversion_says_which_stored_value_it_does_not_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(fixture_named("p02").run), str(tmp_path / "hf"), "--to", "hf", "--argument"]
    stored = mcore_ckpt_ext.open_checkpoint(fixture_named("p02").run).job.arguments().rotary_base
    assert main([*words, "rotary_base=500000", "--argument", "swiglu=true"]) == 0
    shown = capsys.readouterr()
    assert f"rotary_base is 500000, as passed; the checkpoint stores {stored}" in shown.out + shown.err
    assert "swiglu is" not in shown.out + shown.err


def test_a_member_of_an_enumeration_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint stores its class and its number, of which the job's `--attention-backend unfused` is the name."""
    words = ["plan", str(fixture_named("p02").run), "--gpus", "4", "--argument"]
    assert main([*words, "attention_backend=unfused"]) == 0
    assert "note: attention_backend" not in capsys.readouterr().out
    assert main([*words, "attention_backend=flash"]) == 0
    assert "attention_backend is flash, as passed; the checkpoint stores unfused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("attention_backend=banana", "flash, fused, unfused, local, auto"),
        ("fp8=banana", "e4m3, hybrid"),
        ('recompute_modules=["mlp", "banana"]', "core_attn, moe_act"),
        ("recompute_granularity=banana", "full, selective"),
    ],
)
def test_a_word_that_megatron_does_not_know(argument: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The estimate would otherwise take it for the default."""
    words = ["plan", str(fixture_named("p02").run), "--gpus", "4", "--argument"]
    assert main([*words, argument]) == 2
    shown = capsys.readouterr().err
    assert f"expected: {expected}" in shown and "correct the value after --argument" in shown
    assert main([*words, "attention_backend=fused", "fp8=null", 'recompute_modules=["mlp"]']) == 0


def test_values_are_compared_as_megatron_stores_them() -> None:
    stored = JobArguments.of({"moe_layer_freq": (1, 0), "params_dtype": dtype_named("bfloat16"), "num_experts": None})
    passed = {"moe_layer_freq": [1, 0], "params_dtype": str(dtype_named("bfloat16")), "seq_length": 8}
    assert replaced_values(stored, passed) == ()
    assert with_passed(stored, passed).seq_length == 8
    assert replaced_values(stored, {"num_experts": 4}) == ("num_experts is 4, as passed; the checkpoint stores None",)


@pytest.mark.parametrize("name", ["p02", "p05"])
@pytest.mark.parametrize("passed", ["norm_epsilon", "layernorm_epsilon"])
def test_either_name_of_an_argument_replaces_the_stored_value(
    name: str, passed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron stores the value of `--norm-epsilon` under another name since 0.16."""
    words = ["convert", str(fixture_named(name).run), str(tmp_path / "hf"), "--to", "hf", "--argument"]
    assert main([*words, f"{passed}=0.25"]) == 0
    assert re.search(r"norm_epsilon is 0.25, as passed; the checkpoint stores 1e-05", capsys.readouterr().out)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert next(value for key, value in config.items() if "eps" in key) == 0.25


def test_both_names_of_an_argument_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["convert", str(fixture_named("p02").run), str(tmp_path / "hf"), "--to", "hf", "--argument"]
    assert main([*words, "norm_epsilon=0.25", "layernorm_epsilon=0.5"]) == 2
    assert "passed under two names; found: norm_epsilon and layernorm_epsilon" in capsys.readouterr().err
