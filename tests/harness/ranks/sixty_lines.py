"""A training program that uses Megatron Core alone, and not this package: it only saves and loads.

argv: tensor and pipeline parallel size, the folder to load or "none", the folder to save or "none", and the way of
loading: `together`, `strict` (the same, and no stored key may be unused), `returned` (the same, and unused keys are
returned), `nested` (in a list within a dict), `model-first` (two calls), `optimizer-first` (its state is read before
the model has any), `verl` (each in a separate folder, as in verl), `root` (the same, with the optimizer's state as the
root of the stored state), `verl-first` (as `verl`, with the optimizer's state first), or `called` (the only way that
uses this package: for the optimizer, and for the sidecar). With `frozen`, the embeddings and the first two layers are
not trained, so that a stage may have nothing to train. With `stub`, such a rank has an empty optimizer, as
`get_megatron_optimizer` made it up to 0.13, and is skipped as in training loops. With `buckets`, a buffer has several
buckets, and `fully_reshardable` is saved. With `decoupled`, embeddings have a decoupled learning rate. With `twice`,
the first rank requests the optimizer under two keys. With `plain`, the optimizer is not distributed, and embeddings,
weights of norms, and their biases have groups of their own. With `lr_mult`, groups lose that setting before they are
saved. With `random`, random states are saved and loaded; their grid has a data-parallel axis if they are saved, as
Megatron 0.16.1 stores those of jobs with several expert ranks.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

import mcore_ckpt_ext

tensor, pipeline, source, target, way = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
experts = 4 if "experts" in sys.argv else None
parallel_state.initialize_model_parallel(tensor, pipeline)
tensor_parallel.model_parallel_cuda_manual_seed(1234)
dtype = {"bf16": True, "params_dtype": torch.bfloat16}
config = TransformerConfig(
    num_layers=4, hidden_size=32, num_attention_heads=4, num_moe_experts=experts, add_bias_linear=not experts,
    use_cpu_initialization=True, gradient_accumulation_fusion=False, sequence_parallel=bool(experts) and tensor > 1,
    tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, pipeline_dtype=torch.bfloat16, **dtype,
)  # fmt: skip
stage = {
    "pre_process": parallel_state.is_pipeline_first_stage(), "post_process": parallel_state.is_pipeline_last_stage()
}  # fmt: skip
model = GPTModel(config, get_gpt_layer_local_spec(num_experts=experts), 128, 32, **stage)
if {"frozen", "stub"} & {*sys.argv}:
    frozen = [layer for layer in model.decoder.layers if layer.layer_number <= 2]
    for module in (*frozen, *([model.embedding] if stage["pre_process"] else [])):
        module.requires_grad_(False)
is_distributed = "plain" not in sys.argv
small = {"overlap_grad_reduce": True, "bucket_size": 3000} if "buckets" in sys.argv else {}
buffers = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed, grad_reduce_in_fp32=True, **small)
wrapped = DistributedDataParallel(config, buffers, Float16Module(config, model))
rates = {"decoupled_lr": 5e-4, "decoupled_min_lr": 1e-5} if "decoupled" in sys.argv else {}
settings = OptimizerConfig(lr=1e-3, use_distributed_optimizer=is_distributed, **rates, **dtype)
overrides = {
    ParamKey(attr="is_embedding_or_output_parameter"): {"max_lr": 5e-4},
    ParamKey(name="*layernorm.weight"): {"wd_mult": 0.0},
    ParamKey(name="*layernorm.bias"): {"wd_mult": 0.5},
}
optimizer = get_megatron_optimizer(settings, [wrapped], None if is_distributed else overrides)
if "stub" in sys.argv and not any(parameter.requires_grad for parameter in model.parameters()):
    optimizer = ChainedOptimizer([])
form = "fully_reshardable" if "buckets" in sys.argv else "dp_reshardable"
metadata = {
    "distrib_optim_sharding_type": form, "singleton_local_shards": False, "chained_optim_avoid_prefix": True
}  # fmt: skip
whole = {"model": model.sharded_state_dict(metadata=metadata)}
random: dict[str, Any] = {}
if "random" in sys.argv:
    grid = [pipeline, tensor, parallel_state.get_data_parallel_world_size()]
    ranks = [parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()]
    ranks += [parallel_state.get_data_parallel_rank()]
    axes, replica = (3, 0) if target != "none" else (2, ranks[2])
    states = [torch.get_rng_state()]
    random["rng_state"] = ShardedObject("rng_state", states, tuple(grid[:axes]), tuple(ranks[:axes]), replica)


def load(folder: Path, *parts: str) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": whole["model"], **random} if "model" in parts else {}
    if "optimizer" in parts and not optimizer.is_stub_optimizer:
        asked["optimizer"] = optimizer.sharded_state_dict(whole, is_loading=True, metadata=metadata)
    if "twice" in sys.argv and torch.distributed.get_rank() == 0:
        asked["again"] = optimizer.sharded_state_dict(whole, is_loading=True, metadata=metadata)
    if way == "root" and "optimizer" in parts:
        return {"optimizer": dist_checkpointing.load(asked["optimizer"], str(folder))}
    if way == "nested":
        asked["trainer"] = {"optimizers": [asked.pop("optimizer")]}
        found: Any = dist_checkpointing.load(asked, str(folder))
        return {**found, "optimizer": found["trainer"]["optimizers"][0]}
    strict = {"strict": "raise_all", "returned": "return_all"}.get(way, "assume_ok_unexpected")
    found = dist_checkpointing.load(asked, str(folder), strict=strict)
    if way == "returned":
        found, *left = found
        if any(map(len, left)):
            raise RuntimeError(f"left over: {left}")
    return found


if source != "none":
    ran = Path(source)
    if way in ("together", "strict", "returned", "nested", "called"):
        loaded = load(ran, "model", *(["optimizer"] if way != "called" else []))
    elif way in ("model-first", "root", "verl"):
        places = [ran / part / "dist_ckpt" if way != "model-first" else ran for part in ("model", "optimizer")]
        loaded = {**load(places[0], "model"), **load(places[1], "optimizer")}
    else:
        places = [ran / part / "dist_ckpt" if way == "verl-first" else ran for part in ("optimizer", "model")]
        optimizer.load_state_dict(load(places[0], "optimizer")["optimizer"])
        loaded = load(places[1], "model")
    model.load_state_dict(loaded["model"])
    if random:
        torch.set_rng_state(loaded["rng_state"][0])
    if way == "called":
        mcore_ckpt_ext.load_optimizer(ran, model, optimizer)
    elif way not in ("optimizer-first", "verl-first") and not optimizer.is_stub_optimizer:
        optimizer.load_state_dict(loaded["optimizer"])
if target != "none":
    state = {**whole, **random}
    if not optimizer.is_stub_optimizer:
        train(wrapped, optimizer)  # noqa: F821 - defined by the program that runs this one: a step, or a simulated one
        for group in optimizer.param_groups if "lr_mult" in sys.argv else ():
            del group["lr_mult"]
        state["optimizer"] = optimizer.sharded_state_dict(whole, metadata=metadata)
    apart = {"model/dist_ckpt": ["model"], "optimizer/dist_ckpt": ["optimizer"]}
    parts = apart if way in ("verl", "root") else {"": [*state]}
    for place, names in parts.items():
        folder = Path(target) / place
        folder.mkdir(parents=True, exist_ok=True)
        stored = {name: state[name] for name in names} if [way, *names] != ["root", "optimizer"] else state["optimizer"]
        dist_checkpointing.save(stored, str(folder), content_metadata=metadata)
    if way == "called":
        mcore_ckpt_ext.save_sidecar(target, model, optimizer)
