"""Detects the kinds of optimizers in a live job, and differences from the checkpoint's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.master_check import keeps_fp16_masters
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import OptimizerAdapter
from mcore_ckpt_ext.megatron.live.optimizer_adapters.distributed import DistributedAdapter
from mcore_ckpt_ext.megatron.live.optimizer_adapters.inner_optimizers import kept_by
from mcore_ckpt_ext.megatron.live.optimizer_adapters.layer_wise import LayerWiseAdapter
from mcore_ckpt_ext.megatron.live.optimizer_adapters.offloaded import OffloadedAdapter
from mcore_ckpt_ext.megatron.live.optimizer_adapters.precision_aware import PrecisionAwareAdapter, keeps_halves
from mcore_ckpt_ext.megatron.live.optimizer_adapters.undistributed import UndistributedAdapter

# megatron/core/optimizer/optimizer.py, core_v0.7.0 to 0.19.2.
_UNDISTRIBUTED = ("Float16OptimizerWithFloat16Params", "FP32Optimizer")


@dataclass(frozen=True)
class Chain:
    """The optimizers of a live job that step parameters, without stubs, by the way they keep masters.

    Attributes:
        distributed: the DistributedOptimizers.
        whole: optimizers of whole parameters, each with the LayerWiseDistributedOptimizer that distributes its
            parameters to data-parallel ranks, or None.
        unknown: all others.
    """

    distributed: Sequence[Any]
    whole: Sequence[tuple[Any, Any]]
    unknown: Sequence[Any]

    @property
    def supported(self) -> Sequence[Any]:
        """The optimizers that this package supports."""
        return (*self.distributed, *(optimizer for optimizer, _ in self.whole))

    @classmethod
    def of(cls, optimizer: Any) -> Chain:
        """Return the members of an optimizer that may be a (nested) chain.

        With `--optimizer muon --use-distributed-optimizer` a chain holds a LayerWiseDistributedOptimizer, itself a
        chain, and the DistributedOptimizer for parameters that Muon does not step (`_get_megatron_emerging_optimizer`,
        megatron/core/optimizer/__init__.py, core_v0.19.1, 0.19.2 and the development head of August 2026).
        """
        distributed = []
        whole = []
        unknown = []
        for child, layer_wise in _leaves(optimizer, None):
            if hasattr(child, "gbuf_ranges"):
                distributed.append(child)
            elif type(child).__name__ in _UNDISTRIBUTED and kept_by(child.optimizer) is not None:
                whole.append((child, layer_wise))
            else:
                unknown.append(child)
        return cls(distributed, whole, unknown)


def _leaves(optimizer: Any, layer_wise: Any) -> Iterator[tuple[Any, Any]]:
    children = getattr(optimizer, "chained_optimizers", None)
    if children is None:
        if not getattr(optimizer, "is_stub_optimizer", False):
            yield optimizer, layer_wise
        return
    # LayerWiseDistributedOptimizer, core_v0.16.0 to 0.19.2.
    layer_wise = optimizer if hasattr(optimizer, "allgather_params") else layer_wise
    for child in children:
        yield from _leaves(child, layer_wise)


def optimizer_adapters_of(optimizer: Any) -> list[OptimizerAdapter]:
    """Return the adapters for a (chained) optimizer's masters and moments.

    Raises:
        UnsupportedCheckpointError: this package cannot fill some optimizer of the chain.
    """
    chain = Chain.of(optimizer)
    if chain.unknown:
        first = chain.unknown[0]
        raise UnsupportedCheckpointError(
            "this version does not support this kind of optimizer",
            found=" over ".join(type(level).__name__ for level in (first, getattr(first, "optimizer", None)) if level),
            hint="resume with the layout and optimizer of the checkpoint, which stock Megatron "
            "supports; or with --no-load-optim",
        )
    check_supported(chain.distributed)
    return [
        *(_adapter_of(child) for child in chain.distributed),
        *(
            LayerWiseAdapter(child, layer_wise) if layer_wise is not None else UndistributedAdapter(child)
            for child, layer_wise in chain.whole
        ),
    ]


def _adapter_of(optimizer: Any) -> OptimizerAdapter:
    if is_offloaded(optimizer):
        return OffloadedAdapter(optimizer)
    return PrecisionAwareAdapter(optimizer) if is_precision_aware(optimizer) else DistributedAdapter(optimizer)


def check_supported(optimizers: Sequence[Any]) -> None:
    """Refuse masters of fp8 or fp4 primary weights that are not plain fp32 shards.

    Raises:
        UnsupportedCheckpointError: the masters are in the fused optimizer, or some of them are on the CPU.
    """
    for optimizer in optimizers:
        # Transformer Engine's quantized tensors show a high-precision dtype; their buffers do not.
        if not any(dtypes[0] == torch.uint8 for ranges in optimizer.gbuf_ranges for dtypes in ranges):
            continue
        config = optimizer.config
        inside = getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", is_precision_aware(optimizer))
        if inside or is_offloaded(optimizer):
            raise UnsupportedCheckpointError(
                "this version does not support this kind of optimizer from a checkpoint of another kind or layout",
                found="fp8 or fp4 primary weights whose masters are in the fused optimizer, or on the CPU",
                expected="plain fp32 masters",
                hint="resume under the layout that the checkpoint was written with; without "
                "--use-precision-aware-optimizer and --optimizer-cpu-offload; or with --no-load-optim",
            )


def is_precision_aware(optimizer: Any) -> bool:
    """Return True if Transformer Engine's FusedAdam, or the CPU's Adam, keeps the masters."""
    return bool(getattr(optimizer.config, "use_precision_aware_optimizer", False))


def is_offloaded(optimizer: Any) -> bool:
    """Return True if a DistributedOptimizer works on the CPU in part (HybridDeviceOptimizer)."""
    return hasattr(optimizer.optimizer, "sub_optimizers")


def omits_state(optimizer: Any) -> bool:
    """Return True if a DistributedOptimizer loads other moments than its inner optimizer keeps.

    It uses the name of the job's optimizer, which is Lion's in a job with a layer-wise Lion, while Adam steps the other
    parameters (`optimizer_state_keys`, megatron/core/optimizer/distrib_optimizer.py; `result.config = config`,
    `_get_megatron_emerging_optimizer`, megatron/core/optimizer/__init__.py; core_v0.19.1, 0.19.2 and the development
    head of August 2026).
    """
    kept = kept_by(optimizer.optimizer)
    handled = getattr(optimizer, "optimizer_state_keys", None)
    return kept is not None and handled is not None and set(kept) != set(handled)


def keeps_remainders(optimizer: Any) -> bool:
    """Return True if the optimizer keeps only the trailing 16 bits of bf16 weights' masters, as int16.

    Source: `FusedAdam.store_param_remainders`, transformer_engine/pytorch/optimizers/fused_adam.py, 2.1 to 2.20.2;
    Megatron sets it since core_v0.11.0 if the class supports it, and has no flag for it.
    """
    inner = optimizer.optimizer
    return bool(getattr(inner, "store_param_remainders", False) and getattr(optimizer.config, "bf16", False))


def any_keeps_remainders(optimizer: Any) -> bool:
    """Return True if any optimizer in a live optimizer's chain keeps remainders."""
    return any(map(keeps_remainders, Chain.of(optimizer).distributed))


def differing_arguments(
    chain: Chain, written: JobArguments, kind: str | None, stored_remainders: Callable[[], bool]
) -> list[str]:
    """Return the optimizer arguments that differ from the checkpoint's; Megatron does not check them.

    torch's loader copies numbers into any tensor that is requested: int16 remainders into fp32 masters, or masters
    into remainders (seen with core_v0.19.0 and 0.19.2; NaN after the next step).

    Args:
        chain: the live optimizers.
        written: the arguments of the job that wrote the checkpoint.
        kind: the running job's optimizer, by `kind_named`.
        stored_remainders: returns True if the checkpoint has remainders; called only if both jobs may have them.
    """
    optimizers = chain.distributed
    differing = list[str]()
    if bool(written.use_distributed_optimizer) == bool(chain.whole or chain.unknown):
        differing.append("use_distributed_optimizer")
    if bool(written.optimizer_cpu_offload) != any(map(is_offloaded, optimizers)):
        differing.append("optimizer_cpu_offload")
    aware = any(map(is_precision_aware, optimizers))
    if bool(written.use_precision_aware_optimizer) != aware:
        differing.append("use_precision_aware_optimizer")
    elif aware and not differing and stored_remainders() != any(map(keeps_remainders, optimizers)):
        differing.append("store_param_remainders")
    elif aware and not differing and keeps_fp16_masters(written) != any(map(keeps_halves, optimizers)):
        differing.append("main_params_dtype")
    return [*differing, *(["optimizer"] if is_another_kind(written, kind) else [])]


def is_another_kind(written: JobArguments, kind: str | None) -> bool:
    """Return True if the running job's optimizer `kind` (by `kind_named`) differs from the checkpoint's."""
    return len({name for name in (kind_named(written.raw), kind) if name}) > 1


def kind_named(arguments: Mapping[str, Any]) -> str | None:
    """Return the optimizer that a job's arguments name; None if they name none.

    `dist_muon` is `muon` with distributed parameters (megatron/training/arguments.py, core_v0.16.1 to 0.19.2). Adam or
    Lion steps the parameters that Muon does not (`--muon-scalar-optimizer`, since core_v0.19.0).
    """
    name = str(arguments.get("optimizer") or "").removeprefix("dist_")
    other = arguments.get("muon_scalar_optimizer")
    return f"{name} and {other}" if "muon" in name and other not in (None, "adam") else name or None
