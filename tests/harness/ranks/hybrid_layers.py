"""A layer spec of Megatron's hybrid model (Mamba, attention, MLP) made of Megatron's own local modules.

Megatron's own spec needs Transformer Engine, and the Mamba mixer needs the `mamba_ssm` kernels, which run on GPUs only,
as a gated delta product needs those of `fla`. A model of these modules can be built, optimized and saved here, but not
run. The mixers' gated norm belongs to the kernels and is left out.
"""

from __future__ import annotations

from functools import partial

from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

try:
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
except ImportError:  # up to core_v0.16
    from megatron.core.ssm import mamba_block as hybrid_block
    from megatron.core.ssm.mamba_block import MambaStack as HybridStack
    from megatron.core.ssm.mamba_block import MambaStackSubmodules as HybridStackSubmodules

try:
    from megatron.core.ssm import gated_delta_product
except ImportError:  # up to core_v0.19
    gated_delta_product = None

# The kernels are needed only to run the mixer.
mamba_mixer.HAVE_MAMBA_SSM = True
assert hybrid_block.TENorm is TENorm
hybrid_block.TENorm = WrappedTorchNorm

_MIXER = ModuleSpec(
    module=mamba_mixer.MambaMixer,
    params={"rmsnorm": False},
    submodules=mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
)
_ATTENTION = ModuleSpec(
    module=SelfAttention,
    params={"attn_mask_type": AttnMaskType.causal},
    submodules=SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
    ),
)
_LINEARS = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
_MLP = (
    partial(MLP.as_mlp_submodule, submodules=_LINEARS)
    if hasattr(MLP, "as_mlp_submodule")  # since core_v0.18
    else ModuleSpec(module=MLP, submodules=_LINEARS)
)


def _product() -> ModuleSpec:
    """Return a gated delta product, built without its kernels."""
    module = gated_delta_product
    module.HAVE_MAMBA_SSM = module.HAVE_FLA = True
    module.chunk_gated_delta_product = lambda *tensors: None
    module.check_fla_sequence_packing_support = lambda: (True, "")
    linears = module.GatedDeltaProductMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return ModuleSpec(module=module.GatedDeltaProductMixer, params={"rmsnorm": False}, submodules=linears)


def _stack(keys: dict[str, str], mixer: ModuleSpec = _MIXER) -> ModuleSpec:
    """`keys`: the keys under which norms are stored, if they differ from their own."""
    mamba = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    attention = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm, self_attention=_ATTENTION, self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=keys,
    )  # fmt: skip
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm, mlp=_MLP, mlp_bda=get_bias_dropout_add, sharded_state_dict_keys_map=keys
    )
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )


hybrid_stack = _stack({})
# With the mixers' gated norms, which `mamba_kernels.py` has.
stack_with_norms = _stack({}, ModuleSpec(module=mamba_mixer.MambaMixer, submodules=_MIXER.submodules))
# With the keys that GPT has in either layer spec.
stack_after_gpt = _stack({
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
})  # fmt: skip
if gated_delta_product is not None:
    stack_of_products = _stack({}, _product())
