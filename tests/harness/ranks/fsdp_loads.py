"""Plugin for jobs of either FSDP: loads one checkpoint after the other, dumps the live state after each, trains on.

TEST_LOADS names a file with a list of `[name, arguments]`; without it the plugin does nothing. In the folder of that
file, `<name>.safetensors` gets the optimizer's own masters and moments, `<name>.json` the error, the iteration, and the
settings of each parameter. A job with `--save` saves the state of the last load before it trains on.
"""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata
from megatron.training import get_args, training
from safetensors.torch import save_file

original = training.setup_model_and_optimizer


@functools.wraps(original)
def setup_and_load(*positional: Any, **keywords: Any) -> Any:
    model, optimizer, scheduler = original(*positional, **keywords)
    if "TEST_LOADS" not in os.environ:
        return model, optimizer, scheduler
    order = Path(os.environ["TEST_LOADS"])
    arguments = get_args()
    for name, changed in json.loads(order.read_text()):
        error, before = None, {key: getattr(arguments, key) for key in changed}
        vars(arguments).update(changed)
        scheduler = training.get_optimizer_param_scheduler(optimizer)
        for count in ("iteration", "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"):
            setattr(arguments, count, 0)
        try:
            arguments.iteration = training.load_checkpoint(model, optimizer, scheduler)[0]
        except Exception as refusal:
            error = f"{type(refusal).__name__}: {refusal}"
        vars(arguments).update(before)
        tensors = state_of(model, optimizer)
        if torch.distributed.get_rank() == 0:
            save_file(tensors, order.with_name(f"{name}.safetensors"))
            settings = [
                {key: value for key, value in group.items() if key in ("lr", "wd_mult", "step")}
                for group in optimizer.param_groups
            ]
            told = {"error": error, "iteration": arguments.iteration, "groups": settings, "steps": scheduler.num_steps}
            order.with_name(f"{name}.json").write_text(json.dumps(told))
    if arguments.save:
        training.save_checkpoint(arguments.iteration, model, optimizer, scheduler, 0)
    return model, optimizer, scheduler


def state_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return masters and moments, gathered on every rank."""
    return state_of_torch(model, optimizer) if get_args().use_torch_fsdp2 else state_of_megatron(model, optimizer)


def state_of_torch(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return masters, moments and weights of a job of torch's FSDP."""
    (child,) = optimizer.chained_optimizers
    names = {id(parameter): bare(name) for name, parameter in model[0].named_parameters()}
    found = {f"weight.{bare(name)}": parameter for name, parameter in model[0].named_parameters()}
    for parameters, masters in zip(child.float16_groups, child.fp32_from_float16_groups, strict=True):
        for parameter, master in zip(parameters, masters, strict=True):
            state = {"fp32_param": master, **child.optimizer.state[master]}
            found.update({f"{kind}.{names[id(parameter)]}": value for kind, value in state.items()})
    return {name: value.detach().full_tensor().contiguous() for name, value in found.items()}


def state_of_megatron(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return masters and moments of a job of Megatron-FSDP."""
    metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    weights = model[0].state_dict_for_save_checkpoint()
    masters = {f"fp32_param.{in_whole(bare(name))}": value for name, value in weights.items()}
    states = optimizer.sharded_state_dict({}, metadata=metadata)["state"]
    moments = {f"{kind}.{bare(name)}": value for name, state in states.items() for kind, value in state.items()}
    # Megatron's `uneven_dtensor_to_full_tensor` takes several collectives for each tensor; this is one for all.
    own = {
        name.replace("local_experts", "experts"): (value.shape, *own_part(value))
        for name, value in {**masters, **moments}.items()
        if isinstance(value, torch.distributed.tensor.DTensor)
    }
    every: list[dict[str, Any]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, own)
    whole: dict[str, torch.Tensor] = {}
    for name, (shape, slices, part) in (item for found in every for item in found.items()):
        whole.setdefault(name, torch.full(shape, torch.nan))[slices] = part
    return whole


def own_part(value: Any) -> tuple[tuple[slice, ...], torch.Tensor]:
    """Return where this rank's part of a DTensor begins and ends in each dimension, and the part."""
    if not hasattr(value._local_tensor, "__create_chunk_list__"):
        update_uneven_dtensor_chunk_metadata(value)
    (chunk,) = value.__create_chunk_list__()
    bounds = zip(chunk.offsets, chunk.sizes, strict=True)
    return tuple(slice(start, start + size) for start, size in bounds), value.to_local()


def in_whole(name: str) -> str:
    """Return the name of an expert's parameter with its global number, which the optimizer uses for moments."""
    arguments = get_args()
    own = (arguments.num_experts or 1) // arguments.expert_model_parallel_size
    first = own * parallel_state.get_expert_model_parallel_rank()
    return re.sub(r"local_experts\.(\d+)", lambda found: f"local_experts.{first + int(found[1])}", name)


def bare(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


training.setup_model_and_optimizer = setup_and_load
