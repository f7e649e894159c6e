"""The master check: each fp32 master, rounded to its weight's dtype, equals the weight bit for bit.

This holds because `DistributedOptimizer.step` writes the weights by a plain cast of the masters
(`_copy_main_params_to_model_params`, megatron/core/optimizer/distrib_optimizer.py, core_v0.7.0 to 0.19.2).
If weights are fp32, weight and master are the same.

Transformer Engine's kernel for a precision-aware optimizer derives bf16 weights from its masters by rounding to
nearest, but with ties away from zero instead of to even (`AdamFunctorMasterParamRemainder`,
transformer_engine/common/multi_tensor/adam.cu, 2.1 to 2.20). For such jobs both roundings of a tie are accepted.

Masters in fp16 (`--main-params-dtype fp16`) are not the numbers that the weights were cast from: the kernel rounds one
fp32 number to both, and the fp16 one is scaled by the largest number of its tensor (`_apply_scale`,
transformer_engine/pytorch/optimizers/fused_adam.py, 2.1 to 2.20). For such jobs the check requires only that each
master is within half a step of bf16 plus a step of fp16 of its weight. The second half step of fp16 is needed because a
resume under another layout, whose shards have other scales, rounds masters once more. This detects a misplaced
parameter, but not every flipped bit.

Weights in fp8 or fp4 (`--fp8-param-gather`, `--fp4-param-gather`) are quantized from fp32 masters
(`quantize_param_shard`, megatron/core/fp8_utils.py, core_v0.12.1 to 0.19.2; `quantize_nvfp4_param_shard`, fp4_utils.py,
core_v0.19.0), and dequantized for a checkpoint (`_clone_or_dequantize_if_needed`, filesystem_async.py in
megatron/core/dist_checkpointing/strategies, 0.19). For them, too, the check requires nearness: each master is within
half a step of its dequantized weight. Quantization multiplies by the scale of a block, rounds to nearest, and limits
the result to the largest number (`CurrentScalingQuantizerRef._quantize`,
`NVFP4QuantizerRef._quantize_blockwise_reference`, in transformer_engine/pytorch/custom_recipes/reference_*.py, 2.20.2).
Half a step is a sixteenth of the weight in E4M3, a quarter in E2M1.

Near a weight of zero, steps are as wide as the scale. The tolerance there follows from the scale if it is stored or
live. Otherwise it follows from two of the weights at hand: the largest, which a fitting scale maps to the largest
number; and the smallest that is not zero, which is at least a step, even with a badly fitting scale (a delayed scale is
1 until a number was seen). The largest weight may also represent a larger master, which a delayed scale has truncated.

About one in 25 pairs of unrelated values is as near in fp8, and one in 3 in fp4. A misplaced parameter is detected by a
handful of elements, a flipped bit only if it moves a master by a step or more.

If each block has its own scale (128 x 128 or 1 x 128 elements in fp8, 32 in a row in MXFP8, 16 x 16 or 16 in a row in
NVFP4), a flattened part of a weight does not show where its blocks begin. So the largest weight at hand is used in
place of the largest of each block. Near a weight of zero in a block of small weights, a master may then be off by many
of that block's steps: up to 2**-12 of the largest weight in fp8, 2**-4 in fp4.

In such a job, parameters that are not quantized, for example norms and embeddings, are equal when rounded, but the
check does not require it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mcore_ckpt_ext.errors import ProofError
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.lazy_torch import torch

_CACHED_NUMEL = 1 << 15
"""Number of elements that fit into a processor's cache; torch uses several threads for more."""
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def bits_dtype(itemsize: int) -> torch.dtype:
    """Return the integer dtype of a width in bytes, in which bits are compared."""
    dtype: torch.dtype = getattr(torch, _INTEGERS[itemsize])
    return dtype


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first element where master and weight disagree.

    Attributes:
        position: its place in the compared order.
        master: its master.
        weight: its weight.
        count: number of compared elements that disagree.
    """

    position: int
    master: float
    weight: float
    count: int

    def __str__(self) -> str:
        return f"master {self.master!r}, weight {self.weight!r} at element {self.position} ({self.count} in all)"


@dataclass(frozen=True)
class MasterCheck:
    """A relation between masters and weights, and its verification.

    Attributes:
        relation: a description of the relation.
        first_mismatch: returns the first mismatch of masters and weights of the same shape; None if there is none.
        weakness: the larger, the less the check detects.
        fault: a description of a mismatch.
        quantized: the numbers of quantized weights; None for others.
    """

    relation: str
    first_mismatch: Callable[[torch.Tensor, torch.Tensor], Mismatch | None]
    weakness: int
    fault: str = "a master does not round to its weight"
    quantized: _Quantized | None = None

    def with_step(self, step: float) -> MasterCheck:
        """Return the check for quantized weights whose two smallest numbers differ by `step`."""
        if self.quantized is None or step <= self.quantized.step:
            return self
        quantized = replace(self.quantized, step=step)
        return replace(self, first_mismatch=quantized.first_mismatch, quantized=quantized)

    @property
    def is_approximate(self) -> bool:
        """True if the check shows only that masters are near their weights."""
        return self.weakness > BY_EITHER_ROUNDING.weakness

    def verify(
        self, masters: torch.Tensor, weights: torch.Tensor, where: Callable[[int], str], more_hint: str = ""
    ) -> None:
        """Refuse masters that do not match their weights.

        Args:
            masters: fp32 masters, or the values that the optimizer keeps in place of them.
            weights: weights of the same shape, stored or live.
            where: describes the element at a position of the compared order.
            more_hint: what the error's hint ends with.

        Raises:
            ProofError: a master does not match its weight.
        """
        mismatch = self.first_mismatch(masters, weights)
        if mismatch is not None:
            raise ProofError(
                self.fault,
                found=f"master {mismatch.master!r}",
                expected=f"weight {mismatch.weight!r}",
                where=where(mismatch.position),
                hint="the checkpoint is damaged, or its weights were edited after the save" + more_hint,
            )


def first_mismatch(master: torch.Tensor, weight: torch.Tensor) -> Mismatch | None:
    """Compare fp32 masters with weights of the same shape, bit for bit after the cast.

    Returns:
        None if all are equal.
    """
    if master.device.type == weight.device.type == "cpu" and _all_round(master.detach(), weight.detach()):
        return None
    rounded = master.detach().to(weight.dtype).contiguous()
    bits = bits_dtype(weight.dtype.itemsize)
    return _mismatch(master, weight, (rounded.view(bits) != weight.detach().contiguous().view(bits)).reshape(-1))


def _all_round(master: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether all masters round to their weights.

    Parts are compared that fit into a processor's cache, and are so small that torch does not wake its threads.
    """
    masters = master.reshape(-1)
    weights = weight.reshape(-1)
    size = weight.dtype.itemsize
    numel = weights.numel()
    # Compare as the widest integers possible: the fewer elements, the faster.
    in_words = not (weights.storage_offset() * size % 8 or numel * size % 8)
    bits = torch.int64 if in_words else bits_dtype(size)
    if numel <= _CACHED_NUMEL:
        return torch.equal(masters.to(weight.dtype, copy=True).view(bits), weights.view(bits))
    rounded = torch.empty(_CACHED_NUMEL, dtype=weight.dtype)
    weight_parts = torch.split(weights.view(bits), _CACHED_NUMEL * size // bits.itemsize)
    for part, weight_part in zip(torch.split(masters, _CACHED_NUMEL), weight_parts, strict=True):
        rounded = rounded[: part.numel()]  # the last part may be shorter
        rounded.copy_(part)
        if not torch.equal(rounded.view(bits), weight_part):
            return False
    return True


def _first_mismatch_either_rounding(master: torch.Tensor, weight: torch.Tensor) -> Mismatch | None:
    """Compare like `first_mismatch`, but also accept ties that are rounded away from zero.

    Returns:
        None if all are equal.
    """
    mismatch = first_mismatch(master, weight)
    if mismatch is None or weight.dtype != torch.bfloat16 or master.dtype != torch.float32:
        return mismatch
    # Of all fp32 numbers, the two roundings differ only for ties; the int16 sum wraps around as in the kernel.
    away = ((master.detach().contiguous().view(torch.int32) + 0x8000) >> 16).to(torch.int16)
    bits = weight.detach().contiguous().view(torch.int16)
    even = master.detach().to(torch.bfloat16).contiguous().view(torch.int16)
    return _mismatch(master, weight, ((even != bits) & (away != bits)).reshape(-1))


def _first_mismatch_fp16(master: torch.Tensor, weight: torch.Tensor) -> Mismatch | None:
    """Compare masters that were rounded to fp16 with weights: see the module's docstring.

    Returns:
        None if all are near; NaN is not near any number.
    """
    masters = master.detach().double().reshape(-1)
    weights = weight.detach().double().reshape(-1)
    # Below the smallest normal number, fp16 has steps of 2**-24, times a scale of the largest number / 65504. If only a
    # part of the tensor is at hand, its largest number may be smaller, which 2**-30 allows for.
    floor = float(weights.abs().max()) * 2**-30 if weights.numel() else 0.0
    half_steps = torch.finfo(weight.dtype).eps / 2 + torch.finfo(torch.float16).eps
    return _mismatch(
        master, weight, ~((masters - weights).abs() <= weights.abs() * half_steps * (1 + half_steps) + floor)
    )


def _mismatch(master: torch.Tensor, weight: torch.Tensor, differs: torch.Tensor) -> Mismatch | None:
    """Return the first element that `differs`; None if none does."""
    if not bool(differs.any()):
        return None
    position = int(differs.nonzero()[0])
    return Mismatch(
        position,
        float(master.reshape(-1)[position]),
        float(weight.reshape(-1)[position]),
        int(differs.sum()),
    )


@dataclass(frozen=True)
class _Quantized:
    """Numbers of few bits times a scale, and how far from them a master may be.

    Attributes:
        half_step: half the distance of two neighbors, relative to the larger one.
        of_largest: the tolerance near a weight of zero, as a fraction of the largest weight at hand. Half of the
            smallest step is 2**-10 of 448 in E4M3, twice that if scales are powers of two; the largest weight at hand
            may be smaller than that of the block, or than the one that a delayed scale is based on. In E2M1 it is 1/4
            of 6.
        of_smallest: the same tolerance as a fraction of the smallest weight at hand that is not zero, and of the step.
        step: the distance of the two smallest numbers, times the scale; 0 if no scale is known.
    """

    half_step: float
    of_largest: float
    of_smallest: float
    step: float = 0.0

    def first_mismatch(self, master: torch.Tensor, weight: torch.Tensor) -> Mismatch | None:
        """Return the first master that is not within half a step of its weight; NaN is not near any number."""
        if first_mismatch(master, weight) is None:
            return None
        masters = master.detach().double().reshape(-1)
        weights = weight.detach().double().reshape(-1)
        sizes = weights.abs()
        largest = float(sizes.max())
        smallest = float(sizes.where(sizes > 0, torch.inf).min())
        # Both masters and weights may have been rounded to the weights' dtype on the way.
        rounding = 2 * torch.finfo(weight.dtype).eps
        share = self.half_step * (1 + self.half_step) + rounding
        step = max(self.step, smallest if largest else 0.0)
        floor = max(largest * self.of_largest, step * self.of_smallest * (1 + rounding))
        differs = ~((masters - weights).abs() <= sizes * share + floor)
        # The largest weight may be a truncated master.
        is_largest = (sizes >= largest * (1 - self.half_step / 8)) & (masters.sign() == weights.sign())
        differs &= ~(is_largest & (masters.abs() >= sizes) & (masters.abs() <= 2 * sizes))
        return _mismatch(master, weight, differs)


def _quantized_check(numbers: str, quantized: _Quantized, weakness: int) -> MasterCheck:
    relation = f"within {numbers} rounding of their weights"
    fault = f"a master is not within {numbers} rounding of its weight"
    return MasterCheck(relation, quantized.first_mismatch, weakness, fault, quantized)


BY_ROUNDING = MasterCheck("equal to their weights when rounded", first_mismatch, 0)
BY_EITHER_ROUNDING = MasterCheck(
    "equal to their weights when rounded, ties either way", _first_mismatch_either_rounding, 1
)
WITHIN_FP16 = MasterCheck(
    "within fp16 rounding of their weights",
    _first_mismatch_fp16,
    2,
    "a master is not within fp16 rounding of its weight",
)
WITHIN_FP8 = _quantized_check("fp8", _Quantized(2**-4, 2**-12, 1 / 2), 3)
# Stored quantized weights that a live job quantizes again, with the scale of other parts: both roundings add up.
WITHIN_FP8_TWICE = _quantized_check("fp8 (twice)", _Quantized(2**-3, 2**-11, 1.0), 4)
WITHIN_FP4 = _quantized_check("fp4", _Quantized(2**-2, 2**-4, 1 / 2), 5)
WITHIN_FP4_TWICE = _quantized_check("fp4 (twice)", _Quantized(2**-1, 2**-3, 1.0), 6)


def weaker_of(one: MasterCheck, other: MasterCheck | None) -> MasterCheck:
    """Return the weaker of two checks; None requires nothing.

    If both sides are quantized, both roundings apply.
    """
    if other is None:
        return one
    weaker = max(one, other, key=lambda check: check.weakness)
    if one.quantized is None or other.quantized is None:
        return weaker
    twice = WITHIN_FP4_TWICE if weaker.weakness >= WITHIN_FP4.weakness else WITHIN_FP8_TWICE
    return twice.with_step(max(one.quantized.step, other.quantized.step))


def smallest_step(dtype: torch.dtype, scale: float) -> float:
    """Return the distance of the two smallest numbers of a floating-point dtype, times a scale."""
    numbers = torch.finfo(dtype)
    return abs(scale) * numbers.smallest_normal * numbers.eps


def master_check_of(arguments: JobArguments) -> MasterCheck:
    """Return the master check for a job with these arguments."""
    if arguments.fp4_param_gather:
        return WITHIN_FP4
    if arguments.fp8_param_gather:
        return WITHIN_FP8
    if not arguments.use_precision_aware_optimizer:
        return BY_ROUNDING
    return WITHIN_FP16 if keeps_fp16_masters(arguments) else BY_EITHER_ROUNDING


def has_fused_masters(arguments: JobArguments) -> bool:
    """Return whether the masters of a job are in Transformer Engine's FusedAdam.

    It makes a master of every parameter, but steps fp32 parameters themselves, and leaves their masters as they were
    when they were made (`FusedAdam.step`, transformer_engine/pytorch/optimizers/fused_adam.py, 2.20.2).

    Megatron itself makes the masters of weights in fp8, except with delayed scaling
    (`use_precision_aware_optimizer_no_fp8_or_ds_fp8`, megatron/core/optimizer/optimizer_config.py, core_v0.13.0 to
    0.19.2); with CPU offload, HybridDeviceOptimizer keeps them.
    """
    if not arguments.use_precision_aware_optimizer or arguments.optimizer_cpu_offload:
        return False
    return keeps_fp16_masters(arguments) or arguments.raw.get("fp8_recipe") in (None, "delayed")


def keeps_fp16_masters(arguments: JobArguments) -> bool:
    """Return whether a precision-aware optimizer keeps masters in fp16."""
    is_fp16 = str(arguments.main_params_dtype) in ("fp16", "torch.float16")
    return bool(arguments.use_precision_aware_optimizer) and is_fp16
