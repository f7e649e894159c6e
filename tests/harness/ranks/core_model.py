"""A real model and optimizer of any megatron-core on CPU ranks, from the wheel alone, without megatron.training.

Does the work of `megatron/training/training.py` between arguments and optimizer (`get_model`,
`setup_model_and_optimizer`, core_v0.12.1 to 0.19.2), for a tiny GPT of the local layer spec.
"""

from __future__ import annotations

import argparse
import inspect
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron_on_cpu import dump_optimizer
from megatron_on_cpu.groups import leave_groups

# With 48 positions the tied embedding does not begin at a multiple of three: see `SOURCES` in jobs.py.
HIDDEN, HEADS, LAYERS, VOCABULARY, POSITIONS, EXPERTS = 32, 4, 4, 128, 48, 4
_KINDS = ("fp32_param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions, and other settings that determine the positions of parameters."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    bucket_size: int | None = None


@dataclass(frozen=True)
class Job:
    """A live model and its optimizer; `arguments` are those that Megatron's training would store."""

    chunks: list[Any]
    optimizer: Any
    arguments: dict[str, Any]

    @property
    def models(self) -> list[Any]:
        """The chunks without the wrappers."""
        found = []
        for chunk in self.chunks:
            while hasattr(chunk, "module"):
                chunk = chunk.module
            found.append(chunk)
        return found

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of a chain."""
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])


def start(layout: Layout) -> None:
    """Set up new process groups."""
    parallel_state.destroy_model_parallel()
    leave_groups()
    virtual = layout.virtual if layout.virtual > 1 else None
    parallel_state.initialize_model_parallel(
        layout.tensor, layout.pipeline, virtual,
        expert_model_parallel_size=layout.expert, expert_tensor_parallel_size=layout.expert_tensor,
    )  # fmt: skip
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def build(
    layout: Layout,
    experts: bool,
    tied: bool,
    distributed: bool = True,
    adapt: Callable[[Any], Any] | None = None,
    engine: bool = False,
) -> Job:
    """Build this rank's model, wrapped for training, with its optimizer.

    `adapt`: adds adapters to the model, which is then similar to Llama. `engine`: use Transformer Engine's layers.
    """
    gated = experts or adapt is not None
    like_llama = {"normalization": "RMSNorm", "num_query_groups": 2} if adapt else {}
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=128,
        bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, use_cpu_initialization=True,
        sequence_parallel=experts and layout.tensor > 1,
        tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        expert_model_parallel_size=layout.expert, expert_tensor_parallel_size=layout.expert_tensor or layout.tensor,
        num_moe_experts=EXPERTS if experts else None,
        gradient_accumulation_fusion=False,
        moe_token_dispatcher_type="alltoall", add_bias_linear=not gated, gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu, **like_llama,
    )  # fmt: skip
    wrapped = []
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=layout.bucket_size is not None,
        use_distributed_optimizer=distributed, bucket_size=layout.bucket_size,
    )  # fmt: skip
    for stage in range(layout.virtual):
        model = _chunk(config, layout, stage, experts, tied, engine)
        model = adapt(model) if adapt else model
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        module = Float16Module(config, model)
        wrapped.append(DistributedDataParallel(config, ddp, module, disable_bucketing=stage > 0))
        _check_buckets(wrapped[-1], layout, stage)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-4, weight_decay=0.01, bf16=True, params_dtype=torch.bfloat16,
            use_distributed_optimizer=distributed,
        ),
        wrapped,
    )  # fmt: skip
    arguments = _arguments(layout, experts, tied, distributed)
    if adapt:
        like_llama = {"swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm", "num_query_groups": 2,
                      "group_query_attention": True, "position_embedding_type": "rope"}  # fmt: skip
        arguments |= {**like_llama, "transformer_impl": "transformer_engine" if engine else "local"}
    return Job(wrapped, optimizer, arguments)


def _check_buckets(chunk: Any, layout: Layout, stage: int) -> None:
    """Check that every buffer of the first chunk of the first stage has several buckets, if requested."""
    first = stage == 0 and parallel_state.get_pipeline_model_parallel_rank() == 0
    counts = [len(buffer.buckets) for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    if layout.bucket_size and first and min(counts) < 2:
        raise RuntimeError(f"several buckets wanted, found {counts}")


def _chunk(config: Any, layout: Layout, stage: int, experts: bool, tied: bool, engine: bool) -> Any:
    at = {"vp_stage": stage} if layout.virtual > 1 else {}
    if layout.virtual > 1 and hasattr(parallel_state, "set_virtual_pipeline_model_parallel_rank"):
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
    first, last = (
        function(**({"ignore_virtual": False} | at if "vp_stage" in inspect.signature(function).parameters else {}))
        for function in (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
    )
    rms = config.normalization == "RMSNorm"
    spec = (
        get_gpt_layer_with_transformer_engine_spec()
        if engine
        else get_gpt_layer_local_spec(
            num_experts=EXPERTS if experts else None,
            moe_grouped_gemm=False,
            **({"normalization": "RMSNorm"} if rms else {}),
        )
    )
    here = at if "vp_stage" in inspect.signature(GPTModel.__init__).parameters else {}
    return GPTModel(
        config, spec, VOCABULARY, POSITIONS, pre_process=first, post_process=last,
        share_embeddings_and_output_weights=tied, **({"position_embedding_type": "rope"} if rms else {}), **here,
    )  # fmt: skip


def _arguments(layout: Layout, experts: bool, tied: bool, distributed: bool) -> dict[str, Any]:
    """Return the entries of a training job's `args` that describe the layout of this model."""
    world = torch.distributed.get_world_size()
    return {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "ffn_hidden_size": 128,
        "padded_vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "bf16": True, "fp16": False,
        "tensor_model_parallel_size": layout.tensor, "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "expert_model_parallel_size": layout.expert, "context_parallel_size": 1, "world_size": world,
        "expert_tensor_parallel_size": layout.expert_tensor or layout.tensor,
        "data_parallel_size": world // (layout.tensor * layout.pipeline),
        "num_experts": EXPERTS if experts else None, "moe_grouped_gemm": False, "transformer_impl": "local",
        "untie_embeddings_and_output_weights": not tied, "swiglu": experts, "add_bias_linear": not experts,
        "accumulate_allreduce_grads_in_fp32": True, "use_distributed_optimizer": distributed,
        "overlap_grad_reduce": layout.bucket_size is not None, "ddp_bucket_size": layout.bucket_size,
        "dist_ckpt_strictness": "assume_ok_unexpected", "num_distributed_optimizer_instances": 1,
    }  # fmt: skip


def fill_with_noise(job: Job, tied: bool, seed: int, masters: bool = True) -> None:
    """Give every master and moment a distinct value, equal in all copies, and derive the weights from the masters.

    Groups get distinct steps, learning rates and weight decays. `masters`: False to keep masters and weights.
    """
    names = _names(job, tied)
    for outer in job.optimizers:
        for parameter, master in _masters(outer):
            partitioned = getattr(parameter, "tensor_model_parallel", False)
            expert = not getattr(parameter, "allreduce", True)
            rank = (
                parallel_state.get_expert_tensor_parallel_rank()
                if expert
                else parallel_state.get_tensor_model_parallel_rank()
            )
            key = f"{names[id(parameter)]} {rank if partitioned else 0} {seed}"
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            noise = torch.randn(3, parameter.numel(), generator=generator)
            start = 0
            if hasattr(outer, "gbuf_ranges"):
                start = outer._get_model_param_range_map(parameter)["param"].start
            parts = [part[start : start + master.numel()].view(master.shape) for part in noise]
            with torch.no_grad():
                master.copy_(0.02 * parts[0] if masters else master)
            outer.optimizer.state[master].update({"exp_avg": parts[1].clone(), "exp_avg_sq": parts[2].abs().clone()})
        for group in outer.optimizer.param_groups:
            group |= {"step": seed, "lr": 1e-6 * seed * (1 + group["wd_mult"])}
            group["weight_decay"] = 1e-5 * seed * group["wd_mult"]
        outer._copy_main_params_to_model_params()
    if hasattr(job.optimizers[0], "gbuf_ranges"):
        for chunk in job.chunks:
            chunk.start_param_sync(force_sync=True)


def _masters(outer: Any) -> list[tuple[Any, Any]]:
    if hasattr(outer, "gbuf_ranges"):
        places = outer.model_param_group_index_map.items()
        return [(parameter, outer.optimizer.param_groups[g]["params"][o]) for parameter, (g, o) in places]
    groups = zip(outer.float16_groups, outer.fp32_from_float16_groups, strict=True)
    return [pair for parameters, masters in groups for pair in zip(parameters, masters, strict=True)]


def _names(job: Job, tied: bool) -> dict[int, str]:
    names = {}
    for chunk in job.models:
        layers = dump_optimizer.names_of_layers(chunk)
        for name, parameter in chunk.named_parameters():
            names[id(parameter)] = dump_optimizer.name_in_model(name, layers, chunk.config, tied=tied)
    return names


def sharded_models(job: Job, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the models as `generate_state_dict` describes them, with its `model_sd_kwargs`."""
    found = {}
    for index, chunk in enumerate(job.models):
        if len(job.models) > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(index)
        found["model" if len(job.models) == 1 else f"model{index}"] = chunk.sharded_state_dict(**keywords)
    return found


def dump(job: Job, folder: Path, tied: bool) -> None:
    """Write this rank's part of the live state, for `dump_optimizer.assemble`."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [
        piece
        for index, chunk in enumerate(job.chunks)
        for piece in dump_optimizer.pieces_of_chunk(index, chunk, job.optimizers, tied=tied)
    ]
    content = {"world_size": torch.distributed.get_world_size(), "training": {}, "pieces": [vars(p) for p in pieces]}
    torch.save(content, folder / f"rank_{torch.distributed.get_rank():05d}.pt")


def common_state(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that `save_checkpoint` stores in addition to model and optimizer."""
    scheduler = {"max_lr": 1e-3, "min_lr": 1e-4, "num_steps": 32, "lr_decay_style": "linear"}
    return {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": 4,
        "opt_param_scheduler": scheduler,
        "num_floating_point_operations_so_far": 0,
    }
