"""Derives the arguments of a live job from its model, its wrappers and its ranks.

Attributes used, present from core_v0.12.1 to 0.19.2: `config` of the model chunks (`TransformerConfig`), `ddp_config`
of a DistributedOptimizer (`DistributedDataParallelConfig`).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.job.arguments.table import BRIDGE_FIELDS
from mcore_ckpt_ext.job.dimensions import MODEL_SIZE_ARGUMENTS, SIZE_ARGUMENTS
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import SWITCHES
from mcore_ckpt_ext.layout.weight_shards import WEIGHT_SHARDS
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain

_MODEL_ARGUMENTS = (*MODEL_SIZE_ARGUMENTS, *SWITCHES, *WEIGHT_SHARDS)
# Attributes of `ddp_config` and their arguments: Megatron-Bridge stores this object as its section `ddp`.
BUFFER_ARGUMENTS = {name: argument for name, argument, field in BRIDGE_FIELDS if field.section == "ddp"}


def unwrap_model(model: Any) -> list[Any]:
    """Return the chunks of a model without wrappers for precision and gradients."""
    chunks = []
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        while isinstance(getattr(chunk, "module", None), torch.nn.Module):
            chunk = chunk.module
        chunks.append(chunk)
    return chunks


def chunks_of(optimizer: Any) -> list[Any]:
    """Return the unwrapped model chunks of an optimizer, by its DistributedOptimizers.

    Raises:
        UnsupportedCheckpointError: it has no DistributedOptimizer.
    """
    chunks = [chunk for child in Chain.of(optimizer).distributed for chunk in child.model_chunks]
    if not chunks:
        raise UnsupportedCheckpointError(
            "the model of the optimizer is unknown",
            found=type(optimizer).__name__,
            hint="call mcore_ckpt_ext.load_optimizer(path, model, optimizer)",
        )
    return unwrap_model(list(dict.fromkeys(chunks)))


def live_arguments(chunks: Iterable[Any], optimizer: Any) -> JobArguments:
    """Return the arguments of a live job, by Megatron's names.

    Args:
        chunks: the unwrapped model chunks.
        optimizer: the live optimizer.
    """
    arguments: dict[str, Any] = {}
    config = next((chunk.config for chunk in chunks if hasattr(chunk, "config")), None)
    arguments |= {name: getattr(config, name) for name in _MODEL_ARGUMENTS if hasattr(config, name)}
    arguments["num_experts"] = getattr(config, "num_moe_experts", None)
    for child in Chain.of(optimizer).distributed:
        ddp_config = getattr(child, "ddp_config", None)
        arguments |= {
            argument: getattr(ddp_config, name)
            for name, argument in BUFFER_ARGUMENTS.items()
            if hasattr(ddp_config, name)
        }
    world = dist.get_world_size() if dist.is_initialized() else 1
    sizes = [arguments.get(SIZE_ARGUMENTS[name]) or 1 for name in ("tensor", "pipeline", "context")]
    arguments |= {"world_size": world, "data_parallel_size": max(1, world // prod(sizes))}
    return JobArguments.of(arguments, source="the live model and its optimizer", is_complete=False)
