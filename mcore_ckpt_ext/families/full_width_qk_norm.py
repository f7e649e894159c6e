"""Models that normalize queries, and keys, of all heads together; Megatron Core does so per head."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.job.model_arguments import ModelArguments
from mcore_ckpt_ext.model_space.names import module_and_leaf


class FullWidthQKNorm(Family):
    """A family whose query and key norms span all heads; `spec` is Megatron-Bridge's layer spec."""

    spec: ClassVar[str]
    bridge_only_reason = "Megatron Core normalizes queries and keys per head, this model all heads together"

    @override
    def shape(self, name: str, arguments: ModelArguments) -> tuple[int, ...]:
        heads = {"q_layernorm": arguments.num_attention_heads, "k_layernorm": arguments.num_query_groups}
        module, _ = module_and_leaf(name)
        return (heads[module] * arguments.kv_channels,) if module in heads else super().shape(name, arguments)

    @override
    def bridge_fields(self, arguments: ModelArguments) -> dict[str, Any]:
        return {"transformer_layer_spec": {"_target_": f"megatron.bridge.models.{self.spec}", "_call_": False}}
