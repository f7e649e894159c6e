"""Runs ms-swift's real `save_mcore_checkpoint` and `load_mcore_checkpoint` with a tiny GPT on CPU ranks.

argv: the folder with ms-swift, tensor and pipeline parallel size, the run folder to load or "none", the run folder to
save or "none", and optionally the folders of mcore-bridge, peft and accelerate. With these the model is similar to
Llama, of Transformer Engine's layers, with their adapters, and only the adapters are saved; next to the run folder it
saves the model without them, and the model that they are merged into, in fp32. Stand-ins replace the parts of ms-swift
and mcore-bridge that these two functions use: the unwrapping of a model, a logger, and the check for the first rank.
"""

import importlib
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import core_model
import torch

packages, tensor, pipeline, source, target, *bridge = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]


def module(name: str, path: str = "", **content: Any) -> None:
    made = ModuleType(name)
    made.__path__ = [path] if path else []
    vars(made).update(content)
    sys.modules[name] = made


if "swift" not in sys.modules:
    for name in ("swift", "swift.megatron", "swift.megatron.utils"):
        module(name, f"{packages}/{name.replace('.', '/')}")
    module("swift.utils", check_json_format=dict, get_logger=logging.getLogger, init_process_group=None,
           set_device=None, is_master=lambda: torch.distributed.get_rank() == 0)  # fmt: skip
    module("mcore_bridge", set_random_seed=None, split_cp_inputs=None,
           unwrap_model=lambda chunks: core_model.Job(chunks, None, {}).models)  # fmt: skip
checkpoints: Any = importlib.import_module("swift.megatron.utils.megatron_lm_utils")

layout = core_model.Layout(tensor=tensor, pipeline=pipeline)
core_model.start(layout)


def adapted(model: Any) -> Any:
    """Add ms-swift's adapters to a model, and freeze all other parameters."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    for module in list(model.modules()):
        for child in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
            if hasattr(module, child):
                made = lora.LoraParallelLinear(getattr(module, child), "default", r=4, lora_alpha=8)
                setattr(module, child, made)
                for whole in (made.lora_A["default"], made.lora_B["default"]):
                    # Transformer Engine marks replicated matrices as sharded, too.
                    if not whole.parallel_mode:
                        whole.weight.tensor_model_parallel = False
    return model


if bridge:
    sys.path += bridge[1:]
    module("mcore_bridge.utils", get_current_device=lambda: "cpu")
    module("mcore_bridge.tuners", f"{bridge[0]}/mcore_bridge/tuners")
    lora: Any = importlib.import_module("mcore_bridge.tuners.lora")
    job = core_model.build(layout, experts=False, tied=False, adapt=adapted, engine=True)
else:
    job = core_model.build(layout, experts=False, tied=False)
wrapped, optimizer = job.chunks[0], job.optimizer
stated = {name: value for name, value in job.arguments.items() if name != "dist_ckpt_strictness"}
args = SimpleNamespace(
    **stated, output_dir=target, mcore_model=source, mcore_adapter=source, no_save_optim=False, no_save_rng=True,
    no_load_optim=False, no_load_rng=True, finetune=False, tuner_type="lora" if bridge else "full", async_save=False,
    dist_ckpt_save_pre_mcore_014=False, dist_ckpt_optim_fully_reshardable=False, data_parallel_random_init=False,
    **({"lora_alpha": 8.0, "lora_dropout": 0.0, "use_rslora": False} if bridge else {}),
)  # fmt: skip
load_arg = "mcore_adapter" if bridge else "mcore_model"
if source != "none" and checkpoints.load_mcore_checkpoint(args, [wrapped], optimizer, load_arg=load_arg) != 4:
    raise RuntimeError("resumed from another iteration")
if target != "none":
    train(wrapped, optimizer)  # type: ignore[name-defined]  # noqa: F821 - defined by the program that runs this one
    checkpoints.save_mcore_checkpoint(args, [wrapped], optimizer, iteration=4, peft_format=bool(bridge))
if target != "none" and bridge:
    args.no_save_optim, kept = True, [parameter.data for parameter in wrapped.parameters()]
    checkpoints.save_mcore_checkpoint(args, [wrapped], iteration=4, output_dir=f"{target}/../base")
    for parameter in wrapped.parameters():
        parameter.data = parameter.data.float()
    for one in wrapped.modules():
        if isinstance(one, lora.LoraParallelLinear):
            one.merge(adapter_names=["default"])
    checkpoints.save_mcore_checkpoint(args, [wrapped], iteration=4, output_dir=f"{target}/../merged")
    for parameter, data in zip(wrapped.parameters(), kept, strict=True):
        parameter.data = data
