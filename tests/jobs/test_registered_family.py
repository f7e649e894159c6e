"""Test a genuine Megatron-LM job that starts from a folder of a family that another distribution registers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron_on_cpu.dump_optimizer import assemble
from safetensors.torch import load_file

from mcore_ckpt_ext.families.entry_points import registered_families
from mcore_ckpt_ext.families.flags import training_flags
from mcore_ckpt_ext.formats.hugging_face.model import described_model
from tests.harness.huggingface import make
from tests.harness.layouts import Layout
from tests.harness.registered_families import distribution_with_family, parrot_model
from tests.harness.turns import Turn, run_in_turn


def test_a_job_starts_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("qwen2", tmp_path / "qwen2")
    model = parrot_model(tmp_path / "qwen2", tmp_path / "model")
    site = distribution_with_family(tmp_path / "site")
    plugin = tmp_path / "installed.py"
    plugin.write_text(f"import sys\nsys.path.insert(0, {str(site)!r})\n")
    registered_families.cache_clear()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(site)
        arguments = described_model(model, transformer_impl="local").arguments
    registered_families.cache_clear()
    flags = [*training_flags(arguments), "--no-bias-swiglu-fusion", "--vocab-size", "250"]
    turn = Turn(tmp_path / "job", Layout(1, 2, 2), load=model, until=1, more=flags)
    job = run_in_turn(tmp_path, [turn], [plugin]).job("job")
    said = f"weights of the Hugging Face folder {model}, a Parrot (registered by parrot-families 1.5)"
    assert sum(said in line for line in job.said) == 1
    stored, live = load_file(model / "model.safetensors"), assemble(job.at_load)
    for layer in range(2):
        for theirs, ours in (("perch", "q_layernorm"), ("claw", "k_layernorm")):
            weight = live[f"weight.decoder.layers.{layer}.self_attention.{ours}.weight"]
            assert torch.equal(weight.float(), stored[f"model.layers.{layer}.{theirs}.weight"].to(weight.dtype).float())
