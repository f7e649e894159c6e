"""Test the known orders in which Megatron's layer specs register parameters."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.layout.parameter_order import LOCAL, TRANSFORMER_ENGINE, KnownOrder
from mcore_ckpt_ext.model_space.names import Layer

LAYER = Layer("decoder", 0)


@pytest.mark.parametrize("order", [LOCAL, TRANSFORMER_ENGINE], ids=["local", "Transformer Engine"])
def test_the_gate_of_a_shared_expert_precedes_its_linears(order: KnownOrder) -> None:
    """A module's own parameters come before those of its submodules; so a job of 0.19.0 listed them."""
    shared = ["mlp.shared_experts.gate_weight", *(f"mlp.shared_experts.linear_fc{n}.weight" for n in (1, 2))]
    registered = ["mlp.router.weight", "mlp.experts.experts.0.linear_fc1.weight", *shared]
    assert order.order_in_layer(LAYER, registered[::-1]) == registered


def test_latent_projections_stand_between_router_and_experts() -> None:
    """As `MoELayer.__init__` registers them (moe_layer.py, core_v0.16.0 to 0.19.2)."""
    registered = [
        "pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.fc1_latent_proj.weight", "mlp.fc2_latent_proj.weight",
        "mlp.experts.experts.0.linear_fc1.weight", "mlp.experts.experts.1.linear_fc1.weight",
        "mlp.experts.experts.0.linear_fc2.weight", "mlp.experts.experts.1.linear_fc2.weight",
        "mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight",
    ]  # fmt: skip
    assert TRANSFORMER_ENGINE.order_in_layer(LAYER, sorted(registered)) == registered
