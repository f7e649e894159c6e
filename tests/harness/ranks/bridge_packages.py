"""Megatron-Bridge with the installed Megatron Core, and its own saving and loading of a job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import megatron
import torch
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from stand_ins import stand_in_for


def find(packages: str) -> None:
    """Make `megatron.bridge` importable from a folder, with stand-ins for packages that need a GPU or data."""
    if f"{packages}/megatron" not in megatron.__path__:
        sys.path.append(packages)
        megatron.__path__.append(f"{packages}/megatron")
        # megatron.core is already imported, without Transformer Engine.
        stand_in_for("transformer_engine", "modelopt", "datasets", "tensorboard", "google", "omegaconf",
                     "megatron.energon", "megatron.core.datasets.megatron_tokenizer")  # fmt: skip


def run(
    provider: Any, wrapped: Any, optimizer: Any, source: str, target: str, train: Any = None, peft: Any = None
) -> None:
    """Resume from a run folder, and save into one; "none" skips either.

    Args:
        provider: the model's provider.
        wrapped: the model.
        optimizer: its optimizer.
        source: the run folder to load.
        target: the run folder to save.
        train: changes the state before it is saved, if given.
        peft: how adapters were added to the model; then only adapters are saved.
    """
    from megatron.bridge.training import checkpointing, config, state

    size = provider.tensor_model_parallel_size * provider.pipeline_model_parallel_size
    unset_num_microbatches_calculator()
    init_num_microbatches_calculator(0, None, 8, 1, torch.distributed.get_world_size() // size)
    saved = config.CheckpointConfig(
        save=None if target == "none" else target, load=None if source == "none" else source, ckpt_format="torch_dist"
    )
    cfg = config.ConfigContainer(
        model=provider, checkpoint=saved, logger=config.LoggerConfig(), tokenizer=config.TokenizerConfig(),
        train=config.TrainingConfig(train_iters=8, global_batch_size=8, micro_batch_size=1),
        optimizer=config.OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True),
        ddp=config.DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        peft=peft, scheduler=config.SchedulerConfig(), dataset=config.MockGPTDatasetConfig(
            random_seed=1, seq_length=32, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False
        ),
    )  # fmt: skip
    running: Any = state.GlobalState()
    running._cfg = cfg  # the setter would install signal handlers
    if source != "none":
        step, _ = checkpointing.load_checkpoint(running, [wrapped], optimizer, None)
        if step != (0 if (Path(source) / "release").exists() else 4):
            raise RuntimeError(f"resumed from step {step}")
    if target != "none":
        if train is not None:
            train(wrapped, optimizer)
        running.train_state.step, running.train_state.consumed_train_samples = 4, 32
        checkpointing.save_checkpoint(running, [wrapped], optimizer, None, 0)
