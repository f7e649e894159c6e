"""Computes logits by models of the real Megatron-Bridge, loaded from checkpoints that were converted for it.

argv: the folder with megatron-bridge, and a JSON file with cases: `source` (a Hugging Face folder), `run` (the folder
of the checkpoint), `tokens` and `answer` (files). All ranks are one tensor-parallel group.
"""

import json
import os
import sys
from pathlib import Path

import bridge_packages
import core_model
import torch
from megatron.core import dist_checkpointing
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

packages, cases = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
torch.distributed.init_process_group("gloo")
bridge_packages.find(packages)

from megatron.bridge import AutoBridge  # noqa: E402

ranks = torch.distributed.get_world_size()
for case in cases:
    for backend in ("FLASH", "FUSED", "UNFUSED"):  # which the model before this one set
        os.environ.pop(f"NVTE_{backend}_ATTN", None)
    core_model.start(core_model.Layout(tensor=ranks))
    provider = AutoBridge.from_hf_pretrained(case["source"]).to_megatron_provider(load_weights=False)
    provider.tensor_model_parallel_size, provider.use_cpu_initialization = ranks, True
    provider.params_dtype = provider.autocast_dtype = torch.float32
    provider.bf16 = provider.gradient_accumulation_fusion = provider.apply_rope_fusion = False
    provider.bias_activation_fusion = provider.masked_softmax_fusion = provider.persist_layer_norm = False
    provider.moe_permute_fusion = False
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    provider.finalize()
    model = provider.provide(True, True).eval()
    loaded = dist_checkpointing.load(model.sharded_state_dict(), case["run"])
    missing = model.load_state_dict(loaded, strict=False).missing_keys
    assert not [name for name in missing if not name.endswith("_extra_state")], missing
    tokens = torch.load(case["tokens"])
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
    with torch.no_grad():
        answer = gather_from_tensor_model_parallel_region(model(tokens, positions, mask))
    if torch.distributed.get_rank() == 0:
        torch.save(answer, case["answer"])
