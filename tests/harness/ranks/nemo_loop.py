"""Writes or loads a checkpoint like NeMo 2.3.2, by the same calls of Megatron Core and Fiddle in the same order.

It replaces `MegatronStrategy.save_checkpoint` and `load_checkpoint`, `MegatronParallel.sharded_state_dict` and
`TrainerContext.io_dump`, whose package cannot be installed here. argv: tensor and pipeline parallel size, the
checkpoint's folder, "save" or "load", folders of packages to import.
"""

import json
import sys
from collections import OrderedDict
from dataclasses import fields
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import core_model
import torch
import yaml
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

tensor, pipeline, target, action = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
sys.path += [folder for folder in sys.argv[5:] if folder not in sys.path]

import fiddle  # noqa: E402
from fiddle._src.experimental import serialization  # noqa: E402


class LlamaModel:
    def __init__(self, config: Any = None, optim: Any = None, tokenizer: Any = None) -> None: ...


class MegatronOptimizerModule:
    def __init__(self, config: Any = None) -> None: ...


class MegatronStrategy:
    def __init__(
        self, tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1, **rest: Any
    ) -> None: ...


class Trainer:
    def __init__(self, strategy: Any = None, devices: int = 1) -> None: ...


class Serialization(serialization.Serialization):
    """NeMo's serialization (io/fdl_torch.py), which stores built-in functions by name."""

    def _serialize(self, value: Any, current_path: Any, all_paths: Any = None) -> Any:
        if isinstance(value, BuiltinFunctionType):
            return self._pyref(value, current_path)
        return super()._serialize(value, current_path, all_paths)


class TrainerContext:
    def __init__(self, model: Any = None, trainer: Any = None, extra: Any = None) -> None: ...


def written(value: Any) -> Any:
    """Return a value as `_ordered_arguments_with_default` and `_safe_object_representer` write it into YAML."""
    if isinstance(value, torch.dtype):
        return {"_target_": "torch.dtype", "_call_": True}
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return {"_target_": f"{value.__module__ or 'torch._C._nn'}.{value.__qualname__}", "_call_": False}
    if isinstance(value, (list, tuple)):
        return [written(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else {"_target_": "x", "_call_": True}


core_model.start(core_model.Layout(tensor=tensor, pipeline=pipeline))
job = core_model.build(core_model.Layout(tensor=tensor, pipeline=pipeline), False, tied=False)
wrapped, optimizer = job.chunks[0], job.optimizer
if action == "save":
    train(wrapped, optimizer)  # type: ignore[name-defined]  # noqa: F821 - defined by the program that runs this one
model = job.models[0].sharded_state_dict(prefix="module.")
checkpoint: dict[str, Any] = {
    "epoch": 0, "global_step": 4, "pytorch-lightning_version": "2.5.0", "loops": {"fit_loop": {"state_dict": {}}},
    "lr_schedulers": [{"last_epoch": 4}], "state_dict": OrderedDict(), "sharded_state_dict": model,
}  # fmt: skip
trained = {key: value for key, value in model.items() if not key.endswith("_extra_state")}
# NeMo requests `fully_sharded_model_space`, which Core since 0.16 no longer writes; the names are the same.
kind = {"distrib_optim_sharding_type": "fully_reshardable"}
if action == "load":
    request = {
        "sharded_state_dict": model,
        "optimizer": [optimizer.sharded_state_dict(trained, is_loading=True, metadata=kind)],
    }
    loaded = dist_checkpointing.load(request, str(target / "weights"))
    weights = {key.removeprefix("module."): value for key, value in loaded["sharded_state_dict"].items()}
    job.models[0].load_state_dict(weights)
    optimizer.load_state_dict(loaded["optimizer"][0])
else:
    checkpoint["optimizer"] = [optimizer.sharded_state_dict(trained, metadata=kind)]
    (target / "weights").mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(checkpoint, str(target / "weights"))
if action == "save" and torch.distributed.get_rank() == 0:
    for dtype in ("bfloat16", "float32"):
        serialization.register_constant("torch", dtype, compare_by_identity=True)  # io/fdl_torch.py
    own = job.models[0].config
    stated = {
        "num_layers": own.num_layers, "hidden_size": own.hidden_size, "num_attention_heads": own.num_attention_heads,
        "params_dtype": torch.bfloat16, "bf16": True, "activation_func": torch.nn.functional.gelu, "seq_length": 48,
    }  # fmt: skip
    optim = fiddle.Config(
        MegatronOptimizerModule, config=fiddle.Config(OptimizerConfig, optimizer="adam", lr=1e-3, bf16=True)
    )
    context = fiddle.Config(
        TrainerContext,
        model=fiddle.Config(LlamaModel, config=fiddle.Config(dict, **stated), optim=optim),
        trainer=fiddle.Config(Trainer, devices=4, strategy=fiddle.Config(
            MegatronStrategy, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
            ddp=fiddle.Config(
                DistributedDataParallelConfig, use_distributed_optimizer=True, grad_reduce_in_fp32=True
            ),
        )),
    )  # fmt: skip
    (target / "context").mkdir()
    (target / "context" / "io.json").write_text(json.dumps(Serialization(context).result))
    described = {field.name: written(getattr(own, field.name)) for field in fields(TransformerConfig)}
    described |= {
        "_target_": "nemo.collections.llm.gpt.model.llama.LlamaConfig", "seq_length": 48, "vocab_size": None,
        "share_embeddings_and_output_weights": False, "position_embedding_type": "learned_absolute",
    }  # fmt: skip
    settings = {"_target_": "megatron.core.optimizer.optimizer_config.OptimizerConfig", "optimizer": "adam", "lr": 1e-3}
    whole = {"_target_": "nemo.collections.llm.gpt.model.llama.LlamaModel", "config": described, "optim": {
        "_target_": "nemo.lightning.pytorch.optim.megatron.MegatronOptimizerModule", "config": settings,
    }}  # fmt: skip
    (target / "context" / "model.yaml").write_text(yaml.safe_dump(whole))
