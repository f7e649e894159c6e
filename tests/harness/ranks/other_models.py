"""A training program that uses Megatron Core alone, with models other than GPT: BERT, T5, LLaVA, MIMO; local spec.

argv: the model, tensor and pipeline parallel size, the folder to load or "none", the folder to save or "none". It loads
`torch_dist` and the legacy files, as Megatron's training does, saves `torch_dist` with the arguments that Megatron's
training would store, and does not use this package.
"""

import argparse
import sys
from copy import deepcopy
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mimo import MimoModel, MimoModelConfig
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.T5 import t5_spec
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

kind, tensor, pipeline, source, target = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6]
parallel_state.initialize_model_parallel(tensor, pipeline)
tensor_parallel.model_parallel_cuda_manual_seed(1234)
dtype = {"bf16": True, "params_dtype": torch.bfloat16}
LAYERS, ENCODER_LAYERS, VOCABULARY, POSITIONS = 4, 3, 128, 32
config = TransformerConfig(
    num_layers=LAYERS, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
    gradient_accumulation_fusion=False, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
    pipeline_dtype=torch.bfloat16, attention_backend=AttnBackend.local,
    **dtype,
)  # fmt: skip
first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
tied = {"share_embeddings_and_output_weights": True}


def bert() -> torch.nn.Module:
    """Build BERT as `pretrain_bert.py` does (core_v0.16.1)."""
    return BertModel(config, 2, bert_layer_local_spec, VOCABULARY, POSITIONS, first, last, **tied)


def t5() -> torch.nn.Module:
    """Build T5 as `pretrain_t5.py` does (core_v0.16.1)."""
    t5_spec.TENorm = WrappedTorchNorm
    encoder = deepcopy(config)
    encoder.num_layers = ENCODER_LAYERS
    specs = (
        t5_spec.get_t5_encoder_with_local_block_spec(ENCODER_LAYERS),
        t5_spec.get_t5_decoder_with_local_block_spec(LAYERS),
    )
    return T5Model(config, encoder, *specs, VOCABULARY, POSITIONS, position_embedding_type="relative", **tied)


def tower() -> tuple[TransformerConfig, TransformerConfig, MLPSubmodules]:
    """Return the configurations of the vision tower and of the projector, and the projector's linears."""
    # Without Apex and Transformer Engine the default is torch's norm, which does not accept Megatron's arguments.
    CLIPViTModel.__init__.__defaults__ = (WrappedTorchNorm, WrappedTorchNorm, *CLIPViTModel.__init__.__defaults__[2:])
    vision, projector = deepcopy(config), deepcopy(config)
    vision.num_layers, vision.hidden_size, vision.ffn_hidden_size, vision.kv_channels = 2, 16, 64, 4
    vision.vision_model_type, vision.pipeline_model_parallel_size = "clip", 1
    projector.ffn_hidden_size, projector.pipeline_model_parallel_size = 48, 1
    return vision, projector, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def mimo() -> torch.nn.Module:
    """Build MIMO as examples/mimo/model_providers/llava_vlm.py does (core_v0.19.0), with Core's own vision model."""
    vision, projector, linears = tower()
    sees = {
        "transformer_config": vision, "transformer_layer_spec": get_vit_layer_with_local_spec(), "patch_dim": 2,
        "img_h": 4, "img_w": 4,
    }  # fmt: skip
    projects = {"config": projector, "submodules": linears, "projector_type": "mlp", "input_size": 16}
    images = {
        "encoders": {"clip": ModuleSpec(CLIPViTModel, params=sees)},
        "input_projections": [ModuleSpec(MultimodalProjector, params=projects)],
    }
    speaks = {
        "config": config, "transformer_layer_spec": get_gpt_layer_local_spec(), "vocab_size": VOCABULARY,
        "max_sequence_length": POSITIONS, "pre_process": first, "post_process": last,
    }  # fmt: skip
    parts = {"images": ModuleSpec(VisionModalitySubmodules, submodules=images)}
    made = MimoModel(MimoModelConfig(ModuleSpec(GPTModel, params=speaks), parts, {"images": VOCABULARY - 1}))
    made.share_embeddings_and_output_weights = False  # read by Megatron's schedules
    return made


def llava() -> torch.nn.Module:
    """Build LLaVA as `pretrain_vlm.py` does (core_v0.19.0)."""
    vision, projector, linears = tower()
    return LLaVAModel(
        config, get_gpt_layer_local_spec(), VOCABULARY, POSITIONS, vision, get_vit_layer_with_local_spec(), False,
        projector, linears, "mlp", pre_process=first, post_process=last, add_encoder=first, img_h=4, img_w=4,
        patch_dim=2,
    )  # fmt: skip


model = {"bert": bert, "t5": t5, "llava": llava, "mimo": mimo}[kind]()
buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
for parameter in model.parameters():
    tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
wrapped = DistributedDataParallel(config, buffers, Float16Module(config, model))
settings = OptimizerConfig(lr=1e-3, use_distributed_optimizer=True, **dtype)
optimizer = get_megatron_optimizer(settings, [wrapped])
metadata = {
    "distrib_optim_sharding_type": "dp_reshardable", "singleton_local_shards": False, "chained_optim_avoid_prefix": True
}  # fmt: skip
world = torch.distributed.get_world_size()
whole = {"model": model.sharded_state_dict(metadata=metadata)}
arguments = {
    "num_layers": LAYERS, "encoder_num_layers": {"t5": ENCODER_LAYERS, "llava": 2, "mimo": 2}.get(kind, LAYERS),
    "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 128, "padded_vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS, "bf16": True, "tensor_model_parallel_size": tensor,
    "pipeline_model_parallel_size": pipeline, "virtual_pipeline_model_parallel_size": None, "world_size": world,
    "data_parallel_size": world // (tensor * pipeline), "context_parallel_size": 1, "expert_model_parallel_size": 1,
    "transformer_impl": "local", "untie_embeddings_and_output_weights": kind in ("llava", "mimo"), "swiglu": False,
    "accumulate_allreduce_grads_in_fp32": True, "use_distributed_optimizer": True, "overlap_grad_reduce": False,
    "num_experts": None, "dist_ckpt_strictness": "assume_ok_unexpected", "num_distributed_optimizer_instances": 1,
}  # fmt: skip
if source != "none" and (Path(source) / "mp_rank_00").exists() | (Path(source) / "mp_rank_00_000").exists():
    stage = f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if pipeline > 1 else ""
    own = Path(source) / f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}{stage}"
    stored = torch.load(own / "model_optim_rng.pt", weights_only=False)
    model.load_state_dict(stored["model"])
    optimizer.load_state_dict(stored["optimizer"])
    optimizer.load_parameter_state(str(own / "distrib_optim.pt"))
elif source != "none":
    metadata = dist_checkpointing.load_content_metadata(source)
    whole = {"model": model.sharded_state_dict(metadata=metadata)}
    asked = {**whole, "optimizer": optimizer.sharded_state_dict(whole, is_loading=True, metadata=metadata)}
    loaded = dist_checkpointing.load(asked, source, strict="assume_ok_unexpected")
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
if target != "none":
    train(wrapped, optimizer)  # noqa: F821 - defined by the program that runs this one: a step, or a simulated one
    state = {**whole, "optimizer": optimizer.sharded_state_dict(whole, metadata=metadata)}
    state |= {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 4}
    Path(target).mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(state, target, content_metadata=metadata)
