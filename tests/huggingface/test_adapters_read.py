"""Test how adapters of PEFT are described for Megatron-Bridge."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.adapters_read import bridge_peft
from mcore_ckpt_ext.model_space.adapters import IN, MARK, OUT

QKV, PROJECTION = (f"decoder.layers.0.self_attention.{linear}{MARK}" for linear in ("linear_qkv", "linear_proj"))
DIVIDED = [f"{QKV}adapter_{part}.{end}" for part in "qkv" for end in (IN, OUT)]
WHOLE = [f"{QKV}{end}" for end in (IN, OUT)]
OTHER = [f"{PROJECTION}{end}" for end in (IN, OUT)]


@pytest.mark.parametrize(("names", "kind", "targets"), [
    (DIVIDED + OTHER, "canonical_lora.CanonicalLoRA", ["linear_k", "linear_proj", "linear_q", "linear_v"]),
    (WHOLE + OTHER, "lora.LoRA", ["linear_proj", "linear_qkv"]),
])  # fmt: skip
def test_a_linear_of_several_has_one_adapter_or_one_for_each(names: list[str], kind: str, targets: list[str]) -> None:
    found = bridge_peft([], names, 4, 8.0, 0.0)
    assert found["_target_"] == f"megatron.bridge.peft.{kind}"
    assert sorted(target.rpartition(".")[2] for target in found["target_modules"]) == targets


def test_an_adapter_for_a_part_of_a_linear_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="CanonicalLoRA of a part of a linear only"):
        bridge_peft([], DIVIDED[:4], 4, 8.0, 0.0)
    first_linear = [f"decoder.layers.0.mlp.linear_fc1{MARK}{end}" for end in (IN, OUT)]
    with pytest.raises(UnsupportedCheckpointError, match=r"part of a linear only: decoder\.layers\.0\.mlp"):
        bridge_peft([], DIVIDED + first_linear, 4, 8.0, 0.0)
