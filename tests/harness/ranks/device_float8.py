"""Compares masters with fp8 weights of Transformer Engine's classes, both on a device that the CPU cannot access.

The classes are genuine; their kernels are those of `megatron_on_cpu.engine_kernels`. Prints as JSON, for each class,
what the comparison finds for right masters and for one wrong master, and what it copies to the CPU.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).parents[3]
sys.path += [str(REPOSITORY), str(REPOSITORY / "scripts")]
from megatron_on_cpu import engine_kernels  # noqa: E402

from mcore_ckpt_ext.megatron.live.model import LiveParameter, quantization_check  # noqa: E402
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import Shard  # noqa: E402
from mcore_ckpt_ext.model_space.slices import Region, Slice  # noqa: E402
from tests.harness.device import device  # noqa: E402

SHAPE = 256, 512
BLOCK = 128
START, STOP, WRONG = 1000, 90_000, 70_000
SCALE = 64.0
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def main() -> None:
    """Compare a part of each tensor."""
    engine_kernels.install()
    masters = torch.linspace(-3, 3, SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    found = {}
    for name, make in (("tensorwise", tensorwise), ("blockwise", blockwise)):
        with device() as counts:
            weight = make(masters)
            part = masters.reshape(-1)[START:STOP].to("cuda")
            region = Region.whole("weight", SHAPE)
            shard = Shard(LiveParameter(weight, (region,), {}, may_pad=False), Slice((region,), START, STOP), ())
            before = counts.to_cpu
            master_check = quantization_check(weight)
            assert master_check is not None
            right = master_check.first_mismatch(part, shard.weight)
            part[WRONG] = 9.0
            wrong = master_check.first_mismatch(part, shard.weight)
            found[name] = {
                "class": type(weight).__name__, "device": str(shard.weight.device),
                "right": right is None, "wrong": None if wrong is None else wrong.position,
                "to_cpu": counts.to_cpu - before,
            }  # fmt: skip
    print(json.dumps(found))


def tensorwise(masters: torch.Tensor) -> Any:
    """Return an fp8 weight with one scale, on the device."""
    tensors: Any = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    data = (masters * SCALE).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return tensors.Float8Tensor(
        shape=SHAPE, dtype=torch.bfloat16, data=data.to("cuda"),
        fp8_scale_inv=torch.tensor([1 / SCALE]).to("cuda"), fp8_dtype=engine_kernels.DType.kFloat8E4M3,
        data_transpose=None, quantizer=None, requires_grad=False, device=torch.device("cuda", 0),
    )  # fmt: skip


def blockwise(masters: torch.Tensor) -> Any:
    """Return an fp8 weight with a scale for each square block, on the device."""
    tensors: Any = importlib.import_module("transformer_engine.pytorch.tensor.float8_blockwise_tensor")
    blocks = masters.reshape(SHAPE[0] // BLOCK, BLOCK, SHAPE[1] // BLOCK, BLOCK)
    scales = LARGEST / blocks.abs().amax(dim=(1, 3))
    data = (blocks * scales[:, None, :, None]).to(torch.float8_e4m3fn).view(torch.uint8).reshape(SHAPE)
    return tensors.Float8BlockwiseQTensor(
        shape=SHAPE, dtype=torch.bfloat16, rowwise_data=data.to("cuda"), rowwise_scale_inv=(1 / scales).to("cuda"),
        columnwise_data=None, columnwise_scale_inv=None, fp8_dtype=engine_kernels.DType.kFloat8E4M3, quantizer=None,
        is_2D_scaled=True, requires_grad=False, device=torch.device("cuda", 0),
    )  # fmt: skip


if __name__ == "__main__":
    main()
