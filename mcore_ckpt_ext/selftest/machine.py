"""The resources of this machine for the self-test: devices, Megatron, Transformer Engine, fp8."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

import torch

import mcore_ckpt_ext
from mcore_ckpt_ext.devices import accelerator_type, device_module, driver_versions
from mcore_ckpt_ext.errors import UsageError, quantity
from mcore_ckpt_ext.group_device import default_backend
from mcore_ckpt_ext.selftest.jobs import Machine
from mcore_ckpt_ext.versions import installed_version

_ON_CPU = "the demonstration of the repository runs on the CPU: python3 scripts/demo.py"
_DISTRIBUTIONS = ("megatron-core", "transformer-engine", "apex", "nvidia-resiliency-ext")


def this_machine(ranks: int | None) -> Machine:
    """Return the resources of this machine.

    Args:
        ranks: number of ranks; by default, one for each device.

    Raises:
        UsageError: there is no accelerator, there are fewer than ranks, or `megatron.training` is not installed.
    """
    kind = accelerator_type()
    if kind is None:
        raise UsageError("Megatron needs a GPU, and there is none here", hint=_ON_CPU)
    count = int(device_module(kind).device_count())
    if ranks is not None and ranks > count:
        raise UsageError(
            "each rank needs a GPU of its own", found=f"{quantity(count, 'GPU')} for {quantity(ranks, 'rank')}"
        )
    require_megatron()
    return Machine(ranks or count, default_backend(kind), *_engine())


def require_megatron() -> None:
    """Check that the functions of Megatron that the self-test calls are installed, and what they need.

    The writers of every save need psutil, which megatron-core does not declare (`_process_memory`,
    megatron/core/dist_checkpointing/strategies/filesystem_async.py, core_v0.16.1 to 0.19.2).

    Raises:
        UsageError: Megatron is not installed, or only Megatron Core, or psutil is not.
    """
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise UsageError("Megatron is not installed here", hint="pip install megatron-core (0.17 or later)")
    if find_spec("megatron.training") is None:
        raise UsageError(
            "only Megatron Core is installed here, and the self-test trains with megatron.training",
            hint="install megatron-core 0.17 or later, which has it, or put a clone of Megatron-LM on PYTHONPATH",
        )
    if find_spec("psutil") is None:
        raise UsageError("Megatron needs psutil to save, and it is not installed here", hint="pip install psutil")


def device_name() -> str:
    """Return the name of the first device."""
    kind = accelerator_type()
    return "cpu" if kind is None else str(device_module(kind).get_device_name(0))


def versions() -> Mapping[str, str]:
    """Return the versions of installed packages and drivers that affect the test."""
    installed = {name: installed_version(name) for name in _DISTRIBUTIONS}
    imported = {"mcore_ckpt_ext": mcore_ckpt_ext.__version__, "torch": torch.__version__}
    all_versions = {**imported, **installed, **driver_versions()}
    return {name: version for name, version in all_versions.items() if version}


def _engine() -> tuple[str, str, str]:
    """Return why Transformer Engine's layers, fp8, and blockwise fp8 are unavailable.

    Returns:
        The reasons; empty if they are available.
    """
    if find_spec("transformer_engine") is None:
        why = "fp8 needs Transformer Engine, which is not installed"
        return "Transformer Engine is not installed", why, why
    try:
        import_module("transformer_engine.pytorch")
        # 2.9 moved the functions here from fp8.py, and that module will be removed.
        moved = find_spec("transformer_engine.pytorch.quantization") is not None
        fp8 = import_module(f"transformer_engine.pytorch.{'quantization' if moved else 'fp8'}")
        possible, why_not = fp8.check_fp8_support()
        # Since 2.3.
        check_blocks = getattr(fp8, "check_fp8_block_scaling_support", lambda: (False, "needs Transformer Engine 2.3"))
        blocks_possible, no_blocks = check_blocks()
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything on import
        why = f"Transformer Engine cannot be imported: {type(error).__name__}: {error}"
        return why, why, why
    return "", "" if possible else str(why_not), "" if blocks_possible else str(no_blocks)
