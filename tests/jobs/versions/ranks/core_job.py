"""Saves and resumes with the genuine DistributedOptimizer of the first megatron-core on the path.

argv: a JSON file with the steps (see `jobs.py`). Imports once, then forks the ranks of each step.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron_on_cpu import compat, redirect
from megatron_on_cpu.forked_ranks import Ranks, prepare_to_fork, reserved_port
from megatron_on_cpu.fused_adam import FusedAdam
from megatron_on_cpu.process import die_with_parent

ORDER = json.loads(Path(sys.argv[1]).read_text())
LEGACY, PLAIN = "legacy_torch", "legacy_torch_per_parameter"


def prepare() -> None:
    """What a wheel of megatron-core needs on CPU ranks; nothing of it touches how it saves or loads."""
    torch.set_num_threads(1)
    # numpy 2 took the old name away, which 0.15 and older use.
    numpy.product = numpy.prod  # type: ignore[attr-defined]
    redirect.install()
    for module, names in {
        "megatron.core.optimizer": {"Adam": FusedAdam, "USING_PYTORCH_OPTIMIZER": False},
        "megatron.core.optimizer.distrib_optimizer": {
            "Adam": FusedAdam, "HAVE_APEX_OR_TE": True, "USING_APEX_OPTIMIZER": True, "USING_TE_OPTIMIZER": False
        },
    }.items():  # fmt: skip
        loaded: Any = importlib.import_module(module)
        for name, value in names.items():
            setattr(loaded, name, value)
    # torch 2.13 added an argument that 0.12 does not pass (torch/distributed/checkpoint/filesystem.py).
    files: Any = importlib.import_module("torch.distributed.checkpoint.filesystem")
    written: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    if "serialization_format" in inspect.signature(files._write_item).parameters and hasattr(written, "_write_item"):
        written._write_item = partial(files._write_item, serialization_format=files.SerializationFormat.TORCH_SAVE)
    # 0.12 wants Transformer Engine for a function that copies fp8 parameters, of which there are none here.
    fp8: Any = importlib.import_module("megatron.core.fp8_utils")
    if hasattr(fp8, "_quantize_param_shard_impl"):
        fp8._quantize_param_shard_impl = lambda *parameters: None
    compat.allow_torch_norms_under_sequence_parallelism()
    importlib.import_module("core_model")


def run_rank(rank: int, port: int, step: dict[str, Any]) -> None:
    """All of a step, in one rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=step["ranks"])
    for saving in step.get("save", ()):
        save(saving)
    for loading in step.get("load", ()):
        load(loading)
    torch.distributed.barrier()


def save(order: dict[str, Any]) -> None:
    """Build one source, and save it in every format; one dump tells what was alive."""
    import core_model

    layout, tied = core_model.Layout(**order["layout"]), order["tied"]
    core_model.start(layout)
    job = core_model.build(layout, order["experts"], tied, order["distributed"])
    for optimizer in job.optimizers:
        allocate(optimizer)
    core_model.fill_with_noise(job, tied, seed=7)
    core_model.dump(job, Path(order["truth"]), tied)
    for name, place in order["checkpoints"].items():
        folder = Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        (save_legacy if name in (LEGACY, PLAIN) else save_torch_dist)(job, folder, name)
        torch.distributed.barrier()


def allocate(optimizer: Any) -> None:
    """Moments as after a first step."""
    for group in optimizer.optimizer.param_groups:
        for master in group["params"]:
            zeros = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
            optimizer.optimizer.state[master] = zeros


def save_torch_dist(job: Any, folder: Path, name: str) -> None:
    """`generate_state_dict` and `save_checkpoint` (megatron/training/checkpointing.py) of each version."""
    import core_model
    from megatron.core import dist_checkpointing

    metadata: dict[str, Any] = {"distrib_optim_sharding_type": name}
    if name == "fully_reshardable":
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    if ORDER["version"] >= [0, 14]:
        metadata |= {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    by_keyword = ORDER["version"] < [0, 13]  # there the arguments are all that tells a reader
    parallel = name != "dp_zero_gather_scatter"  # --ckpt-fully-parallel-save
    state = core_model.common_state(job.arguments | {"ckpt_fully_parallel_save": parallel, "ckpt_format": "torch_dist"})
    weights = core_model.sharded_models(job, {} if by_keyword else {"metadata": metadata})
    kind = {"sharding_type": name} if by_keyword else {"metadata": metadata}
    state |= {**weights, "optimizer": job.optimizer.sharded_state_dict(weights, **kind)}
    more = {} if by_keyword else {"content_metadata": metadata}
    dist_checkpointing.save(state, str(folder), save_strategy(parallel), **more)


def save_strategy(parallel: bool) -> Any:
    """As `save_checkpoint` makes it: replicas are spread over the data-parallel ranks, or not."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    if hasattr(serialization, "get_default_save_sharded_strategy"):
        strategy = serialization.get_default_save_sharded_strategy("torch_dist")
    else:
        strategy = torch_dist.TorchDistSaveShardedStrategy()
    if not parallel:
        return strategy
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return FullyParallelSaveStrategyWrapper(strategy, group)


def save_legacy(job: Any, folder: Path, name: str) -> None:
    """`save_checkpoint` with `--ckpt-format torch`."""
    import core_model
    from megatron.core import parallel_state

    rank_folder = folder / rank_name(parallel_state)
    rank_folder.mkdir(exist_ok=True)
    torch.distributed.barrier()
    if name == LEGACY:
        job.optimizer.save_parameter_state(str(rank_folder / "distrib_optim.pt"))
    writes = parallel_state.get_expert_data_parallel_rank() == 0
    if ORDER["version"] >= [0, 18]:
        writes |= parallel_state.get_data_parallel_rank() == 0
    if writes:
        state = core_model.common_state(job.arguments | {"ckpt_format": "torch"})
        for index, chunk in enumerate(job.chunks):
            state["model" if len(job.chunks) == 1 else f"model{index}"] = chunk.state_dict_for_save_checkpoint()
        state["optimizer"] = job.optimizer.state_dict()
        torch.save(state, rank_folder / "model_optim_rng.pt")


def rank_name(parallel_state: Any) -> str:
    """`get_checkpoint_name`."""
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return name


def load(order: dict[str, Any]) -> None:
    """Build one target, and resume it from every checkpoint in turn; each time from other values."""
    import core_model

    from mcore_ckpt_ext import load_optimizer, open_checkpoint
    from mcore_ckpt_ext.megatron.live.model import live_parameters

    layout, tied = core_model.Layout(**order["layout"]), order["tied"]
    core_model.start(layout)
    job = core_model.build(layout, order["experts"], tied)
    # A source has the same weights in all formats: from the first they are loaded, for the others kept.
    weights: dict[Path, list[torch.Tensor]] = {}
    parameters = [parameter for chunk in job.models for parameter in chunk.parameters()]
    for number, (source, target) in enumerate(order["checkpoints"]):
        for optimizer in job.optimizers:
            allocate(optimizer)
        core_model.fill_with_noise(job, tied, seed=100 + number)
        folder = Path(source)
        writer = folder.parents[1]
        if writer in weights:
            with torch.no_grad():
                torch._foreach_copy_(parameters, weights[writer])
        else:
            load_weights(job, open_checkpoint(folder), live_parameters(job.models))
            weights[writer] = [parameter.detach().clone() for parameter in parameters]
        load_optimizer(folder, job.models, job.optimizer)
        core_model.dump(job, Path(target), tied)


def load_weights(job: Any, checkpoint: Any, live: Any) -> None:
    """As the framework loads them: its own reader for torch_dist; the package's for legacy files of another layout."""
    import core_model
    from megatron.core import dist_checkpointing

    if checkpoint.format.name == "torch_dist":
        wanted = core_model.sharded_models(job, {})
        loaded = dist_checkpointing.load(wanted, str(checkpoint.files.folder))
        for name, chunk in zip(wanted, job.models, strict=True):
            chunk.load_state_dict(loaded[name])
        return
    for described in live.values():
        parts = [checkpoint.tensor("weight", region.name).read(region).reshape(-1) for region in described.regions]
        with torch.no_grad():
            described.parameter.copy_(torch.cat(parts).view(described.parameter.shape))


def main() -> int:
    """Import once, fork, wait."""
    die_with_parent()
    prepare()
    # A wheel calls itself by its release; in a checkout's folder the commit is appended.
    version = str(importlib.import_module("megatron.core").__version__).partition("+")[0]
    sys.stdout.write(f"megatron-core {version}\n")
    prepare_to_fork()
    for step in ORDER["steps"]:
        ranks = Ranks()
        with reserved_port() as port:
            for rank in range(step["ranks"]):
                ranks.fork(rank, partial(run_rank, rank, port, step))
            if failed := ranks.wait():
                return failed
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(1)
