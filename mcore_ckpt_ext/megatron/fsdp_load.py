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
from typing import Any

from mcore_ckpt_ext.collectives import agree_here
from mcore_ckpt_ext.formats.plain_dcp import FSDP_DTENSOR, plain_backend
from mcore_ckpt_ext.formats.torch_dcp.reader import NAME as TORCH_DCP
from mcore_ckpt_ext.megatron.live.model import Chunks
from mcore_ckpt_ext.megatron.load_assessment import LoadAssessment
from mcore_ckpt_ext.megatron.load_facts import LoadFacts, Loop
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.policy import decide
from mcore_ckpt_ext.megatron.run_folder import folder_to_load
from mcore_ckpt_ext.megatron.sources.megatron_fsdp import MegatronFsdpAdapter
from mcore_ckpt_ext.megatron.sources.torch_fsdp import TorchFsdpAdapter
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.overrides import Scope


def is_of_fsdp(arguments: Any) -> bool:
    """Return True if a job uses Megatron-FSDP."""
    return arguments.ckpt_format == FSDP_DTENSOR and bool(getattr(arguments, "use_megatron_fsdp", False))


def assess_fsdp(session: LoadSession, directory: str | None, arguments: Any, optimizer: Any) -> LoadAssessment | None:
    """Assess the checkpoint for a job of either FSDP; None if this package has nothing to load."""
    folder = folder_to_load(directory, arguments)
    if folder is None:
        return None
    if is_of_fsdp(arguments):
        is_own = plain_backend(session.with_folder(folder).index) == FSDP_DTENSOR
        return LoadAssessment(folder, decide(LoadFacts(Loop.MEGATRON_FSDP, is_own_format=is_own)))
    return None if optimizer is None else LoadAssessment(folder, decide(LoadFacts(Loop.TORCH_FSDP)))


def load_into_fsdp(scope: Scope, session: LoadSession, stock: Callable[[], Any]) -> tuple[Any, str]:
    """Load a checkpoint of another format into a job of Megatron-FSDP, through a `VirtualStorageReader`.

    Returns:
        The result of `stock`, which calls the original, and a summary.

    Raises:
        ResumeRefusedError: on every rank, if the checkpoint does not fit the job.
    """
    arguments = scope["get_args"]()
    adapter = agree_here("opening the checkpoint", lambda: MegatronFsdpAdapter(session, arguments))
    return adapter.load(scope, arguments, stock)


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
    scope: Scope, session: LoadSession, chunks: Chunks, optimizer: Any, stock: Callable[[], Any]
) -> tuple[Any, str]:
    """Load into a job of torch's FSDP by stock Megatron's function and a `VirtualStorageReader`.

    Returns:
        The result of `stock`, which calls the original, and a summary.

    Raises:
        ResumeRefusedError: on every rank, if the checkpoint does not fit the job.
    """
    arguments = scope["get_args"]()
    adapter = agree_here("opening the checkpoint", lambda: TorchFsdpAdapter(session, arguments, chunks, optimizer))
    with adapter.returning_state():
        return adapter.load(scope, arguments, stock)
