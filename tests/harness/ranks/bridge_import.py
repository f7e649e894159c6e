"""Loads a Hugging Face folder by Megatron-Bridge's real `AutoBridge`; Bridge's loop saves the model, or resumes.

argv: the folder with megatron-bridge, tensor and pipeline parallel size, the Hugging Face folder, the run folder to
load or "none", and the run folder to save or "none". The layers are Transformer Engine's.
"""

import os
import sys
from typing import Any

import bridge_packages
import core_model
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module

packages, tensor, pipeline, source, *places = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:7]
bridge_packages.find(packages)

from megatron.bridge import AutoBridge  # noqa: E402

for backend in ("FLASH", "FUSED", "UNFUSED"):  # set by the program before this one
    os.environ.pop(f"NVTE_{backend}_ATTN", None)
core_model.start(core_model.Layout(tensor=tensor, pipeline=pipeline))
bridge = AutoBridge.from_hf_pretrained(source)
provider = bridge.to_megatron_provider(load_weights=False)
provider.tensor_model_parallel_size, provider.pipeline_model_parallel_size = tensor, pipeline
provider.pipeline_dtype = provider.params_dtype = torch.bfloat16
provider.bf16, provider.use_cpu_initialization, provider.gradient_accumulation_fusion = True, True, False
provider.apply_rope_fusion = provider.bias_activation_fusion = provider.masked_softmax_fusion = False
provider.persist_layer_norm = provider.cross_entropy_loss_fusion = False
provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
provider.finalize()
# The vision part is built only if the stage is declared to be the first one.
model = provider.provide(parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage())
bridge.load_hf_weights([model])
buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
wrapped: Any = DistributedDataParallel(provider, buffers, Float16Module(provider, model))
settings = OptimizerConfig(
    optimizer="adam", lr=1e-3, weight_decay=0.0, bf16=True, clip_grad=0.0, use_distributed_optimizer=True
)
optimizer = get_megatron_optimizer(settings, [wrapped])
wrapped.zero_grad_buffer()
optimizer.step()  # changes no weight, since nothing has a gradient
job = core_model.Job([wrapped], optimizer, {})
bridge_packages.run(
    provider, wrapped, optimizer, *places,
    lambda *_: core_model.fill_with_noise(job, bool(model.share_embeddings_and_output_weights), 7, masters=False),
)  # fmt: skip
