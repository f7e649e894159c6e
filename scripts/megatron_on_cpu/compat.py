"""Patches for Megatron-LM 0.16.1, 0.19.0 and 0.19.2 on CPU ranks, besides the redirection of CUDA.

``apply()`` is called once, after ``redirect.install()``, before the ranks are forked.  Every function documents its
reason, and none changes how Megatron saves or loads a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_on_cpu.engine_kernels import FOLDER_VARIABLE

ADAM_VARIABLE = "MEGATRON_ON_CPU_ADAM"
"""Environment variable: ``torch`` leaves Megatron with torch's AdamW; otherwise the FusedAdam stand-in is used."""

# MockGPTLowLevelDataset counts token ids up to the document's length (4096), beyond a toy vocabulary of 128.
_MOCK_DOCUMENT_LENGTH = 96
_DATASET_HELPER = "megatron.core.datasets.helpers_cpp"


def apply() -> None:
    """Prepare the Megatron that is first on ``sys.path``."""
    use_compiled_dataset_helper()
    _shorten_mock_documents()
    if os.environ.get(FOLDER_VARIABLE):
        _keep_coalesced_collectives_apart()
    elif os.environ.get(ADAM_VARIABLE) != "torch":
        _provide_fused_adam()
    _keep_pipeline_outputs_of_interleaved_schedules()
    allow_torch_norms_under_sequence_parallelism()
    _complete_mixture_of_experts()
    _complete_gloo()
    _allow_uneven_collectives()
    _complete_latent_attention()
    _read_argument_docstrings_once()


def use_compiled_dataset_helper() -> None:
    """Use the helper for datasets that megatron-core's package contains.

    Megatron would compile it with a Makefile, which that package lacks, and end the process.
    """
    _skip_compilation()
    _provide_dataset_helper()


def _skip_compilation() -> None:
    """Skip the compilation of a dataset helper and (in 0.16.1) of CUDA kernels, which are not needed."""
    dataset_utilities: Any = importlib.import_module("megatron.core.datasets.utils")
    dataset_utilities.compile_helpers = lambda: None
    try:
        fused_kernels: Any = importlib.import_module("megatron.legacy.fused_kernels")
    except ModuleNotFoundError:
        return  # 0.19 does not have it
    fused_kernels.load = lambda args: None


def _read_argument_docstrings_once() -> None:
    """Cache the help of options, which 0.16.1 and later read twice per rank from the source of 24 dataclasses."""
    if importlib.util.find_spec("megatron.training.argument_utils") is None:
        return
    factory: Any = importlib.import_module("megatron.training.argument_utils").ArgumentGroupFactory
    read, reader = factory._get_field_docstrings, object.__new__(factory)
    read_once = functools.cache(lambda dataclass: read(reader, dataclass))
    factory._get_field_docstrings = lambda _, dataclass: read_once(dataclass)
    importlib.import_module("megatron.training.arguments").add_megatron_arguments(argparse.ArgumentParser())


def _provide_dataset_helper() -> None:
    """Provide ``helpers_cpp`` of the installed megatron-core, because a checkout has not compiled it."""
    if importlib.util.find_spec(_DATASET_HELPER) is not None:
        return
    installed = importlib.metadata.distribution("megatron-core")
    for file in installed.files or ():
        if file.match("megatron/core/datasets/helpers_cpp*.so"):
            loader = importlib.machinery.ExtensionFileLoader(_DATASET_HELPER, str(file.locate()))
            specification = importlib.machinery.ModuleSpec(_DATASET_HELPER, loader, origin=loader.path)
            module = importlib.util.module_from_spec(specification)
            loader.exec_module(module)
            sys.modules[_DATASET_HELPER] = module
            return
    raise RuntimeError(f"no compiled {_DATASET_HELPER}: neither in the checkout nor in the installed megatron-core")


def _shorten_mock_documents() -> None:
    mock_dataset: Any = importlib.import_module("megatron.core.datasets.gpt_dataset").MockGPTLowLevelDataset
    mock_dataset.max_sequence_length = _MOCK_DOCUMENT_LENGTH


def _provide_fused_adam() -> None:
    """Provide Apex's FusedAdam to the optimizer, while ``import apex`` still fails elsewhere."""
    from megatron_on_cpu.fused_adam import FusedAdam

    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed_optimizer: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    distributed_optimizer.Adam = FusedAdam
    distributed_optimizer.HAVE_APEX_OR_TE = True
    distributed_optimizer.USING_APEX_OPTIMIZER = True
    distributed_optimizer.USING_TE_OPTIMIZER = False


class _Done:
    """The handle of a finished collective."""

    def wait(self) -> None:
        """Do nothing: the collective is finished."""


def _keep_coalesced_collectives_apart() -> None:
    """Run coalesced collectives one by one, because gloo treats tensors of several dtypes as one dtype."""
    buffers: Any = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    buffers._coalescing_manager = lambda *_, **__: contextlib.nullcontext(_Done())
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(buffers, name, functools.partial(_at_once, getattr(buffers, name)))


def _at_once(collective: Callable[..., Any], *positional: Any, **keywords: Any) -> _Done:
    collective(*positional, **{**keywords, "async_op": False})
    return _Done()


def _keep_pipeline_outputs_of_interleaved_schedules() -> None:
    """Keep sent tensors alive: gloo's isend reads them after it has returned, unlike a CUDA stream.

    This is only needed for interleaved schedules; others wait for the send, and their backward pass needs the freed
    output.
    """
    from megatron.core.model_parallel_config import ModelParallelConfig

    original = ModelParallelConfig.__post_init__

    def keep_outputs(self: Any) -> None:
        original(self)
        if self.virtual_pipeline_model_parallel_size is not None:
            self.deallocate_pipeline_outputs = False

    ModelParallelConfig.__post_init__ = keep_outputs


def allow_torch_norms_under_sequence_parallelism() -> None:
    """Allow the torch norm of the local spec with sequence parallelism by marking its weights."""
    norm_class: Any = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    original = norm_class.__new__

    def build_and_mark(cls: Any, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        sequence_parallel = config.sequence_parallel
        config.sequence_parallel = False
        try:
            norm: torch.nn.Module = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        return norm

    norm_class.__new__ = build_and_mark


def _complete_mixture_of_experts() -> None:
    """Define the router's ``te_general_gemm``, whose name is missing without Transformer Engine."""
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _complete_gloo() -> None:
    """Emulate two of NCCL's collectives for experts, which gloo lacks in torch 2.7: averages, and scattered sums."""
    if torch.__version__ >= (2, 9):
        return
    distributed: Any = torch.distributed
    all_reduce = distributed.all_reduce

    def reduce(tensor: torch.Tensor, op: Any = distributed.ReduceOp.SUM, group: Any = None, **kwargs: Any) -> Any:
        if op != distributed.ReduceOp.AVG:
            return all_reduce(tensor, op, group, **kwargs)
        all_reduce(tensor, group=group)
        tensor /= distributed.get_world_size(group)
        return None

    distributed.all_reduce = reduce
    distributed.reduce_scatter = _scatter_sums


def _scatter_sums(output: torch.Tensor, parts: list[torch.Tensor], *, group: Any = None, **_: Any) -> None:
    """Sum each part over the ranks, and keep this rank's."""
    for index, part in enumerate(parts):
        total = part.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        if torch.distributed.get_rank(group) == index:
            output.copy_(total)


def _allow_uneven_collectives() -> None:
    """Emulate with gloo NCCL's collectives for experts: split sizes as tensors, and parts of different lengths."""
    distributed: Any = torch.distributed
    all_to_all_single = distributed.all_to_all_single
    all_gather = distributed.all_gather
    reduce_scatter = distributed.reduce_scatter

    def exchange(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        splits = (
            None if sizes is None else [int(size) for size in sizes]
            for sizes in (output_split_sizes, input_split_sizes)
        )
        return all_to_all_single(output, input, *splits, **kwargs)

    def gather(parts: list[torch.Tensor], part: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if _equally_long(parts):
            return all_gather(parts, part, group=group, async_op=async_op)
        for index, rank in enumerate(distributed.get_process_group_ranks(group)):
            if distributed.get_rank(group) == index:
                parts[index].copy_(part)
            distributed.broadcast(parts[index], src=rank, group=group)
        return None

    def scatter_sums(output: torch.Tensor, parts: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if _equally_long(parts):
            return reduce_scatter(output, parts, *args, **kwargs)
        _scatter_sums(output, parts, **kwargs)
        return None

    distributed.all_to_all_single = exchange
    distributed.all_gather = gather
    distributed.reduce_scatter = scatter_sums


def _equally_long(parts: list[torch.Tensor]) -> bool:
    return len({part.shape for part in parts}) == 1


def _complete_latent_attention() -> None:
    """Complete MLA in the local spec: classes in place of Transformer Engine's for isinstance, and the value size."""
    latent_attention: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    for name in ("TEColumnParallelLinear", "TELinear", "Linear"):
        if not isinstance(getattr(latent_attention, name, None), type):
            setattr(latent_attention, name, type(f"Missing{name}", (), {}))
    attention_class: Any = importlib.import_module(
        "megatron.core.transformer.dot_product_attention"
    ).DotProductAttention
    original = attention_class.__init__

    def initialize(
        self: Any, config: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        original(self, config, *args, **kwargs)
        if v_channels:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    attention_class.__init__ = initialize
