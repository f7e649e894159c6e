"""A training program that passes its process groups to Megatron Core, without any in `parallel_state`.

argv: tensor and pipeline parallel size, the folder to load or "none", the folder to save or "none".
"""

import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

tensor, pipeline, source, target = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]
parallel_state.initialize_model_parallel(tensor, pipeline)
tensor_parallel.model_parallel_cuda_manual_seed(1234)
groups = ProcessGroupCollection.use_mpu_process_groups()
globally = dict(vars(parallel_state))
parallel_state.destroy_model_parallel()  # from here on, use of a global group is a bug
dtype = {"bf16": True, "params_dtype": torch.bfloat16}
config = TransformerConfig(
    num_layers=4, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
    tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, pipeline_dtype=torch.bfloat16, **dtype,
)  # fmt: skip
stage = {"pre_process": groups.pp.rank() == 0, "post_process": groups.pp.rank() == pipeline - 1}
model = GPTModel(config, get_gpt_layer_local_spec(), 128, 32, **stage, pg_collection=groups)
buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
wrapped = DistributedDataParallel(config, buffers, Float16Module(config, model), pg_collection=groups)
settings = OptimizerConfig(lr=1e-3, use_distributed_optimizer=True, **dtype)
optimizer = get_megatron_optimizer(settings, [wrapped], pg_collection=groups, use_gloo_process_groups=False)
metadata = {
    "distrib_optim_sharding_type": "dp_reshardable", "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True, "dp_cp_group": groups.dp_cp,
}  # fmt: skip
whole: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
if source != "none":
    asked = {**whole, "optimizer": optimizer.sharded_state_dict(whole, is_loading=True, metadata=metadata)}
    loaded = dist_checkpointing.load(asked, source)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
if target != "none":
    vars(parallel_state).update(globally)
    train(wrapped, optimizer)  # noqa: F821 - defined by the program that runs this one: a step, or a simulated one
    parallel_state.destroy_model_parallel()
    state = {**whole, "optimizer": optimizer.sharded_state_dict(whole, metadata=metadata)}
    Path(target).mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(state, target, content_metadata={"distrib_optim_sharding_type": "dp_reshardable"})
vars(parallel_state).update(globally)
