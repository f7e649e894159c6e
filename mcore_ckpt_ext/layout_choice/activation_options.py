"""The arguments of a job that decide what its activations need."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout_choice.model_sizes import fraction_of, number_of
from mcore_ckpt_ext.layout_choice.options import Recomputation
from mcore_ckpt_ext.storage.enum_members import as_passed

_DEFAULT_DROPOUT = 0.1
_MOST_UNBALANCED = 2.0
"""The capacity of GShard's experts (Lepikhin et al., arXiv:2006.16668), which bounds what balancing losses achieve."""


@dataclass(frozen=True, slots=True)
class ActivationOptions:
    """The statements of a job's arguments about its activations.

    Attributes:
        recomputation: `--recompute-granularity`.
        modules: `--recompute-modules`; without them, selective recomputation is of the attention core alone
            (`TransformerConfig.__post_init__`, core_v0.12.0 to 0.19.2).
        method: `--recompute-method`.
        period: `--recompute-num-layers`.
        distributes: `--distribute-saved-activations`.
        stores_scores: whether attention stores its matrix of scores, as unfused attention does. Flash attention and
            fused attention keep only the output and one statistic of each row (Dao et al., arXiv:2205.14135).
        has_dropout: whether the residual stream has a mask of dropout.
        linear_input: bytes of an element that a linear layer saves: 1 in fp8 (Transformer Engine's `Linear` and
            `LayerNormLinear` save the quantized input).
        offloaded: terms that `--offload-modules` moves to the host (`--fine-grained-activation-offloading`).
        offloaded_layers: `--cpu-offloading-num-layers`.
        capacity: tokens of an expert in relation to balanced routing (`--moe-expert-capacity-factor`, padded).
        fullest: tokens of the fullest expert-parallel rank in one layer, in relation to balanced routing.
    """

    recomputation: Recomputation = Recomputation.NONE
    modules: frozenset[str] = field(default_factory=frozenset)
    method: str | None = None
    period: int = 1
    distributes: bool = False
    stores_scores: bool = False
    has_dropout: bool = False
    linear_input: int = 2
    offloaded: frozenset[str] = field(default_factory=frozenset)
    offloaded_layers: int = 0
    capacity: float = 1.0
    fullest: float = _MOST_UNBALANCED

    @classmethod
    def of(cls, job: JobArguments, recomputation: Recomputation) -> ActivationOptions:
        """Return the options of a job, with another recomputation."""
        modules: object = job.raw.get("recompute_modules")
        named = frozenset(map(str, modules)) if isinstance(modules, (list, tuple)) else frozenset({"core_attn"})
        method = job.raw.get("recompute_method")
        is_padded = bool(job.raw.get("moe_pad_expert_input_to_capacity"))
        capacity = fraction_of(job, "moe_expert_capacity_factor", 0.0)
        return cls(
            recomputation=recomputation,
            modules=named if recomputation is Recomputation.SELECTIVE else frozenset(),
            method=method if isinstance(method, str) else None,
            period=number_of(job, "recompute_num_layers", 1) or 1,
            distributes=bool(job.raw.get("distribute_saved_activations")),
            stores_scores=_stores_scores(job),
            has_dropout=fraction_of(job, "hidden_dropout", _DEFAULT_DROPOUT) > 0,
            linear_input=1 if job.raw.get("fp8") or job.raw.get("fp4") else 2,
            offloaded=_offloaded_terms(job),
            offloaded_layers=number_of(job, "cpu_offloading_num_layers", 0),
            capacity=capacity if is_padded and capacity else 1.0,
            fullest=_fullest(job, capacity, is_padded=is_padded),
        )


def _fullest(job: JobArguments, capacity: float, *, is_padded: bool) -> float:
    """Return the tokens of the fullest rank in one layer, in relation to balanced routing."""
    if is_padded or job.raw.get("moe_router_force_load_balancing"):
        return 1.0
    return min(capacity, _MOST_UNBALANCED) if capacity else _MOST_UNBALANCED


_OFFLOADED = {
    "attn_norm": "norm output",
    "mlp_norm": "norm output",
    "qkv_linear": "norm output",
    "core_attn": "rotated queries and keys",
    "attn_proj": "attention output",
    "expert_fc1": "arrived tokens",
    "moe_act": "first projection of experts",
}


def _offloaded_terms(job: JobArguments) -> frozenset[str]:
    """Return the terms that are moved to the host.

    Source: `offload_modules` (megatron/core/transformer/transformer_config.py, core_v0.16.0 to 0.19.2).
    """
    modules: object = job.raw.get("offload_modules")
    if not job.raw.get("fine_grained_activation_offloading") or not isinstance(modules, (list, tuple)):
        return frozenset()
    return frozenset(_OFFLOADED[name] for name in map(str, modules) if name in _OFFLOADED)


def _stores_scores(job: JobArguments) -> bool:
    """Return whether attention is Megatron's `DotProductAttention` or Transformer Engine's unfused one.

    `--attention-backend auto`, the default, is flash or fused attention on a GPU
    (`DotProductAttention.__init__`, transformer_engine/pytorch/attention). The local spec always stores the scores
    (megatron/core/transformer/dot_product_attention.py).
    """
    backend = str(as_passed(job.raw.get("attention_backend"))).rpartition(".")[2]
    return job.transformer_impl == "local" or backend in ("unfused", "local")
