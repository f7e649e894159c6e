"""Megatron-Bridge's genuine `save_checkpoint` and `load_checkpoint` around a tiny GPT on CPU ranks.

argv: the folder that megatron-bridge is installed in, tensor and pipeline parallel size, the run folder to load or
"none", the run folder to save or "none", and perhaps "experts".
"""

import sys

import bridge_packages
import core_model
import torch

packages, tensor, pipeline, *places = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6]
bridge_packages.find(packages)

from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: E402

core_model.start(core_model.Layout(tensor=tensor, pipeline=pipeline))
job = core_model.build(core_model.Layout(tensor=tensor, pipeline=pipeline), "experts" in sys.argv, tied=False)
wrapped, optimizer = job.chunks[0], job.optimizer
provider = GPTModelProvider(
    num_layers=core_model.LAYERS, hidden_size=core_model.HIDDEN, num_attention_heads=core_model.HEADS,
    ffn_hidden_size=128, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
    tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, vocab_size=core_model.VOCABULARY,
    share_embeddings_and_output_weights=False, num_moe_experts=core_model.EXPERTS if "experts" in sys.argv else None,
)  # fmt: skip
bridge_packages.run(provider, wrapped, optimizer, *places, train)  # type: ignore[name-defined]  # noqa: F821 - made by whoever runs this
