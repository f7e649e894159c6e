"""Extra states of a newly built model, which Megatron requests from a checkpoint.

With the Transformer Engine spec every linear, norm, and attention with sinks has an empty tensor. With the local spec
linears have None, and other modules have no extra state (`get_extra_state`, extensions/transformer_engine.py and
tensor_parallel/layers.py, core_v0.12 to 0.19.2). A hybrid model's output layer is a linear of Megatron Core under both
specs, and stores None even without a weight of its own (`HybridModel.__init__`, hybrid_model.py, core_v0.19.2;
`MambaModel` of mamba_model.py before).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.anatomy import hybrid_prefix
from mcore_ckpt_ext.model_space.names import EXTRA_STATE

_BLOCKS = ("decoder.", "mtp.")
_LINEAR = ("linear_", "eh_proj", "in_proj", "out_proj", "fc1_latent_proj", "fc2_latent_proj")
_OF_ENGINE = ("norm", "core_attention")


def fresh_extra_states(names: Iterable[str], engine: bool) -> dict[str, Any]:
    """Return the extra states of new modules, by model-space name.

    Args:
        names: the names of all weights.
        engine: True for the Transformer Engine layer spec.
    """
    names = list(names)
    hybrid = hybrid_prefix(names)
    states: dict[str, Any] = {} if hybrid is None else {f"{hybrid}output_layer.{EXTRA_STATE}": None}
    for module in dict.fromkeys(name.rpartition(".")[0] for name in names if name.startswith(_BLOCKS)):
        kind = module.rpartition(".")[2]
        if module.endswith(".mixer.norm"):  # a norm of the Mamba kernels, not of Transformer Engine
            continue
        if kind.startswith(_LINEAR) or (engine and kind.endswith(_OF_ENGINE)):
            states[f"{module}.{EXTRA_STATE}"] = fresh(engine)
    return states


def fresh(engine: bool) -> Any:
    """Return the initial extra state of a module, of Transformer Engine or not."""
    return torch.empty(0, dtype=torch.uint8) if engine else None
