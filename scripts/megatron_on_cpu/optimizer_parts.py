"""Finds the state of a parameter in the live optimizers of a rank, of any kind, for dumps."""

from __future__ import annotations

from typing import Any

import torch

from megatron_on_cpu.precision_aware import MASTER, join

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
# Settings of HybridDeviceOptimizer about classes and execution, not about the computation.
_OWN = ("params", "offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32", "pin_cpu_grads",
        "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d", "fused")  # fmt: skip

Part = tuple[int, dict[str, torch.Tensor], dict[str, Any]]


def optimizers_of(optimizer: Any) -> list[Any]:
    """Yield the optimizers in a chain, which may be nested (LayerWiseDistributedOptimizer is a chain)."""
    children = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if children is None else [leaf for child in children for leaf in optimizers_of(child)]


def optimizer_part(parameter: torch.nn.Parameter, optimizers: list[Any]) -> Part:
    """Find where this rank's shard of a parameter starts, the shard's state, and the options of its group."""
    for optimizer in optimizers:
        is_distributed = hasattr(optimizer, "gbuf_ranges")
        part = _distributed(parameter, optimizer) if is_distributed else _undistributed(parameter, optimizer)
        if part is not None:
            start, tensors, settings = part
            flat = {name: tensor.detach().cpu().clone().view(-1) for name, tensor in tensors.items()}
            return start, flat, {name: value for name, value in settings.items() if name not in _OWN}
    return 0, {}, {}


def _distributed(parameter: torch.nn.Parameter, optimizer: Any) -> Part | None:
    """Find the part in a distributed optimizer."""
    place = getattr(optimizer, "model_param_group_index_map", {}).get(parameter)
    if place is None:
        return None
    buffer, dtypes, bucket = optimizer.model_param_gbuf_map[parameter]
    start = optimizer.gbuf_ranges[buffer][dtypes][bucket]["param_map"][parameter]["param"].start
    inner = optimizer.optimizer
    group = inner.param_groups[place[0]]
    stepped = group["params"][place[1]]
    if hasattr(inner, "sub_optimizers"):
        return start, *_offloaded(stepped, group, inner)
    state = inner.state.get(stepped, {})
    tensors = {"fp32_param": stepped, **{name: state[name] for name in MOMENTS if name in state}}
    if MASTER in state:
        tensors = {name: inner.get_unscaled_state(stepped, name) for name in state}
        master = tensors.pop(MASTER)
        if stepped.dtype == torch.float32:  # FusedAdam does not update this master
            master = stepped
        tensors["fp32_param"] = join(stepped, master) if master.dtype == torch.int16 else master
    # torch's AdamW stores its step with the moments.
    return start, tensors, {**group, **({"step": int(state["step"])} if "step" in state else {})}


def _offloaded(stepped: torch.Tensor, group: dict[str, Any], hybrid: Any) -> tuple[Any, Any]:
    """Return the settings of the sub-optimizer that steps a shard; its next step follows the `step` here."""
    inner = hybrid.param_to_inner_param[stepped]
    for stepper in hybrid.sub_optimizers:
        for own in stepper.param_groups:
            if any(inner is candidate for candidate in own["params"]):
                state = stepper.state.get(inner, {})
                # Before each step the outer group is copied to the inner one.
                counted = int(state["step"]) if "step" in state else {**own, **group}.get("step")
                tensors = {"fp32_param": inner, **{name: state[name] for name in MOMENTS if name in state}}
                return tensors, {**group, "step": counted}
    raise ValueError("no sub-optimizer steps this shard")


def _undistributed(parameter: torch.nn.Parameter, optimizer: Any) -> Part | None:
    """Find the part in an optimizer of whole parameters; in fp32 training, parameters are their own masters."""
    pairs = zip(
        getattr(optimizer, "float16_groups", []), getattr(optimizer, "fp32_from_float16_groups", []), strict=True
    )
    masters = {id(own): main for owns, mains in pairs for own, main in zip(owns, mains, strict=True)}
    main_parameter = masters.get(id(parameter), parameter)
    for group in optimizer.optimizer.param_groups:
        if any(main_parameter is candidate for candidate in group["params"]):
            state = optimizer.optimizer.state.get(main_parameter, {})
            return 0, {"fp32_param": main_parameter, **{name: state[name] for name in MOMENTS if name in state}}, group
    return None
