"""Lets jobs of Megatron-FSDP and torch's FSDP resume any format.

Stock Megatron resumes no job of torch's FSDP. Its loader calls `optimizer.state_dict(is_loading=True)`,
but every optimizer is a ChainedOptimizer, whose `state_dict` has no such parameter (`load_checkpoint`,
megatron/training/checkpointing.py; `get_megatron_optimizer`, megatron/core/optimizer/__init__.py; core_v0.12.1 to
0.19.2 and the development head of August 2026). It would not request Adam's step either, which a fused Adam has in its
parameter groups only after the first step. Such jobs have neither tensor nor pipeline parallelism (`validate_args`,
megatron/training/arguments.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.collectives import agree, agree_here
from mcore_ckpt_ext.formats.plain_dcp import FSDP_DTENSOR, plain_backend
from mcore_ckpt_ext.formats.torch_dcp.reader import NAME as TORCH_DCP
from mcore_ckpt_ext.megatron.live.model import Chunks
from mcore_ckpt_ext.megatron.load_assessment import explain
from mcore_ckpt_ext.megatron.load_facts import LoadFacts, Loop
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.policy import LoadDecision, decide
from mcore_ckpt_ext.megatron.run_folder import folder_to_load
from mcore_ckpt_ext.megatron.sources.megatron_fsdp import MegatronFsdpAdapter
from mcore_ckpt_ext.megatron.sources.torch_fsdp import TorchFsdpAdapter
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.overrides import Scope


def is_of_fsdp(arguments: Any) -> bool:
    """Return True if a job uses Megatron-FSDP."""
    return arguments.ckpt_format == FSDP_DTENSOR and bool(getattr(arguments, "use_megatron_fsdp", False))


def load_into_fsdp(
    scope: Scope, session: LoadSession, directory: str | None, stock: Callable[[], Any]
) -> tuple[Any, str]:
    """Load into a job of Megatron-FSDP: by stock, or other formats through a `VirtualStorageReader`.

    Returns:
        The result of `stock`, which calls the original, and a summary; empty if stock Megatron has loaded.

    Raises:
        ResumeRefusedError: on every rank, if the checkpoint does not fit the job.
    """
    arguments = scope["get_args"]()

    def inspect_here() -> tuple[Path, LoadDecision] | None:
        folder = folder_to_load(directory, arguments)
        if folder is None:
            return None
        is_own = plain_backend(session.with_folder(folder).index) == FSDP_DTENSOR
        return folder, decide(LoadFacts(Loop.MEGATRON_FSDP, is_own_format=is_own))

    looked = agree("looking at the checkpoint", inspect_here)[0]
    if looked is None:
        return stock(), ""
    folder, decision = looked
    explain(decision, folder)
    if decision.is_stock:
        return stock(), ""
    here = session.with_folder(folder)
    return agree_here("opening the checkpoint", lambda: MegatronFsdpAdapter(here, arguments)).load(
        scope, arguments, stock
    )


def is_of_torch_fsdp(arguments: Any) -> bool:
    """Return True if a job uses torch's FSDP and saves checkpoints in `torch_dcp`."""
    return arguments.ckpt_format == TORCH_DCP and bool(getattr(arguments, "use_torch_fsdp2", False))


def advise_torch_fsdp(arguments: Any, directory: str | None) -> None:
    """Log advice for a job of torch's FSDP that uses another format than `torch_dcp`.

    Stock Megatron finds none of its optimizer's parameters in the model's sharded state dict, whose tensors are parts
    of them, and fails with `KeyError: 0` (`get_param_id_to_sharded_param_map`, dist_checkpointing/optimizer.py,
    0.19.2).
    """
    if not getattr(arguments, "use_torch_fsdp2", False) or arguments.ckpt_format == TORCH_DCP:
        return
    if not (arguments.no_load_optim or arguments.finetune) and folder_to_load(directory, arguments) is not None:
        announce(
            f"stock Megatron does not load an optimizer under --use-torch-fsdp2 --ckpt-format {arguments.ckpt_format}; "
            f"with --ckpt-format {TORCH_DCP} this package resumes a checkpoint of any format"
        )


def load_into_torch_fsdp(
    scope: Scope,
    session: LoadSession,
    directory: str | None,
    chunks: Chunks,
    optimizer: Any,
    stock: Callable[[], Any],
) -> tuple[Any, str]:
    """Load into a job of torch's FSDP by stock Megatron's function and a `VirtualStorageReader`.

    Returns:
        The result of `stock`, which calls the original, and a summary; empty if stock Megatron has loaded.

    Raises:
        ResumeRefusedError: on every rank, if the checkpoint does not fit the job.
    """
    arguments = scope["get_args"]()
    folder = agree("looking at the checkpoint", lambda: folder_to_load(directory, arguments))[0]
    if folder is None or optimizer is None:
        return stock(), ""
    explain(decide(LoadFacts(Loop.TORCH_FSDP)), folder)
    here = session.with_folder(folder)
    adapter = agree_here("opening the checkpoint", lambda: TorchFsdpAdapter(here, arguments, chunks, optimizer))
    with adapter.returning_state():
        return adapter.load(scope, arguments, stock)
