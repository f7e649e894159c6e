"""Computes logits by models of the real Megatron-Bridge, loaded from checkpoints that were converted for it.

argv: the folder with megatron-bridge, and a JSON file with cases: `source` (a Hugging Face folder), `run` (the folder
of the checkpoint), `tensor` (size of a tensor-parallel group), `imports`, `tokens` and `answer` (files). An answer has
the logits of the model that the checkpoint's `run_config.yaml` describes, and, if it `imports`, of the one that
Bridge's `AutoBridge` makes of the source.
"""

import json
import os
import pydoc
import sys
from functools import partial
from pathlib import Path
from typing import Any

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


def instantiate(node: Any) -> Any:
    """Do for a part of `run_config.yaml` what Bridge's function of this name does with omegaconf."""
    if not isinstance(node, dict) or "_target_" not in node:
        return node
    target: Any = pydoc.locate(node["_target_"])
    if node.get("_call_") is False:
        return target
    fields = {name: instantiate(value) for name, value in node.items() if not name.startswith("_")}
    return partial(target, **fields) if node.get("_partial_") else target(**fields)


def logits(provider: Any, case: dict[str, Any]) -> torch.Tensor:
    """Build the model, load the checkpoint, and compute the logits on all ranks."""
    for backend in ("FLASH", "FUSED", "UNFUSED"):  # which the model before this one set
        os.environ.pop(f"NVTE_{backend}_ATTN", None)
    core_model.start(core_model.Layout(tensor=case["tensor"]))
    provider.tensor_model_parallel_size, provider.use_cpu_initialization = case["tensor"], True
    provider.params_dtype = provider.autocast_dtype = torch.float32
    provider.bf16 = provider.gradient_accumulation_fusion = provider.apply_rope_fusion = False
    provider.bias_activation_fusion = provider.masked_softmax_fusion = provider.persist_layer_norm = False
    provider.moe_permute_fusion = False
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    provider.finalize()
    model = provider.provide(True, True).eval()
    if bool(provider.mtp_num_layers) != any(name.startswith("mtp.") for name, _ in model.named_parameters()):
        raise RuntimeError(f"mtp_num_layers is {provider.mtp_num_layers}, and the model another one")
    loaded = dist_checkpointing.load(model.sharded_state_dict(), case["run"])
    missing = model.load_state_dict(loaded, strict=False).missing_keys
    if absent := [name for name in missing if not name.endswith("_extra_state")]:
        raise RuntimeError(f"not in the checkpoint: {absent}")
    tokens = torch.load(case["tokens"])
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
    with torch.no_grad():
        return gather_from_tensor_model_parallel_region(model(tokens, positions, mask))


for case in cases:
    described = instantiate(json.loads((Path(case["run"]) / "run_config.yaml").read_text())["model"])
    answer = {"described": logits(described, case)}
    if case["imports"]:
        imported = AutoBridge.from_hf_pretrained(case["source"]).to_megatron_provider(load_weights=False)
        answer["imported"] = logits(imported, case)
    if torch.distributed.get_rank() == 0:
        torch.save(answer, case["answer"])
