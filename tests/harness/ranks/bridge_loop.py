"""Runs Megatron-Bridge's real `save_checkpoint` and `load_checkpoint` with a tiny GPT on CPU ranks.

argv: the folder with megatron-bridge, tensor and pipeline parallel size, the run folder to load or "none", the run
folder to save or "none", and optionally "experts" (with "expert-parallel", on two ranks), or the kind of adapters to
add to the model: "lora", "dora", "canonical". With adapters it also saves, next to the run folder, the model without
them, and the model's output with them; with "lora" also both in one checkpoint.
"""

import shutil
import sys
from pathlib import Path

import bridge_packages
import core_model
import torch
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

packages, tensor, pipeline, *places = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6]
bridge_packages.find(packages)

from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: E402
from megatron.bridge.peft import canonical_lora, dora, lora, utils  # noqa: E402

utils.HAVE_TE = False  # otherwise it compares with classes of Transformer Engine that are None here
kinds = {"lora": lora.LoRA, "dora": dora.DoRA, "canonical": canonical_lora.CanonicalLoRA}
# For row-parallel linears, DoRA computes norms of each rank's columns only.
chosen = {"dora": {"target_modules": ["linear_qkv", "linear_fc1"]}}
(adapters,) = [kinds[word](dim=4, alpha=8, **chosen.get(word, {})) for word in sys.argv[6:] if word in kinds] or [None]
layout = core_model.Layout(tensor=tensor, pipeline=pipeline, expert=2 if "expert-parallel" in sys.argv else 1)
core_model.start(layout)
job = core_model.build(layout, "experts" in sys.argv, tied=False, adapt=adapters)
wrapped, optimizer = job.chunks[0], job.optimizer
like_llama = {
    "normalization": "RMSNorm", "num_query_groups": 2, "position_embedding_type": "rope", "gated_linear_unit": True,
    "add_bias_linear": False, "activation_func": torch.nn.functional.silu,
}  # fmt: skip
provider = GPTModelProvider(
    num_layers=core_model.LAYERS, hidden_size=core_model.HIDDEN, num_attention_heads=core_model.HEADS,
    ffn_hidden_size=128, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
    tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, vocab_size=core_model.VOCABULARY,
    expert_model_parallel_size=layout.expert,
    share_embeddings_and_output_weights=False, num_moe_experts=core_model.EXPERTS if "experts" in sys.argv else None,
    **(like_llama if adapters else {}),
)  # fmt: skip
makes = train  # type: ignore[name-defined]  # noqa: F821 - defined by the program that runs this one
bridge_packages.run(provider, wrapped, optimizer, *places, makes, peft=adapters)
if adapters and places[1] != "none":
    run, model = Path(places[1]), job.models[0]
    whole = model.sharded_state_dict()
    saved = {"base": {key: value for key, value in whole.items() if ".adapter." not in key}}
    for name, content in (saved | ({"whole": whole} if "lora" in sys.argv else {})).items():
        (run.parent / name).mkdir(exist_ok=True)
        dist_checkpointing.save({"model": content, "iteration": 4, "checkpoint_version": 3.0}, str(run.parent / name))
    model.float().eval()
    for module in model.modules():
        if hasattr(module, "input_in_float16"):  # the softmax rounds to the dtype that it was built for
            module.input_in_float16 = module.input_in_bf16 = False
    tokens, mask = torch.arange(12).view(1, -1), torch.ones(12, 12).triu(1).bool()[None, None]
    with torch.no_grad():
        answer = gather_from_tensor_model_parallel_region(model(tokens, tokens, mask))
    model.bfloat16()  # back to the original dtype: the numbers are exact in both
    if torch.distributed.get_rank() == 0:
        for name in ("base", "whole"):
            if (run.parent / name).exists():
                shutil.copy(run / "iter_0000004" / "run_config.yaml", run.parent / name)
        torch.save(answer, run.parent / "answer.pt")
