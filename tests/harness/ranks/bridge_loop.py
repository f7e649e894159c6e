"""Megatron-Bridge's genuine `save_checkpoint` and `load_checkpoint` around a tiny GPT on CPU ranks.

argv: the folder that megatron-bridge is installed in, tensor and pipeline parallel size, the run folder to load or
"none", the run folder to save or "none", and perhaps "experts".
"""

import sys
from types import SimpleNamespace
from typing import Any

import core_model
import megatron
import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from stand_ins import stand_in_for

packages, tensor, pipeline, source, target = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6]
if f"{packages}/megatron" not in megatron.__path__:
    sys.path.append(packages)
    megatron.__path__.append(f"{packages}/megatron")
    # megatron.core has been imported: it does without Transformer Engine.
    stand_in_for("transformer_engine", "modelopt", "datasets", "tensorboard", "google", "omegaconf",
                 "megatron.core.datasets.megatron_tokenizer")  # fmt: skip

from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: E402
from megatron.bridge.training import checkpointing, config, state  # noqa: E402

core_model.start(core_model.Layout(tensor=tensor, pipeline=pipeline))
unset_num_microbatches_calculator()
init_num_microbatches_calculator(0, None, 8, 1, torch.distributed.get_world_size() // (tensor * pipeline))
job = core_model.build(core_model.Layout(tensor=tensor, pipeline=pipeline), "experts" in sys.argv, tied=False)
wrapped, optimizer = job.chunks[0], job.optimizer
provider = GPTModelProvider(
    num_layers=core_model.LAYERS, hidden_size=core_model.HIDDEN, num_attention_heads=core_model.HEADS,
    ffn_hidden_size=128, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
    tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, vocab_size=core_model.VOCABULARY,
    share_embeddings_and_output_weights=False, num_moe_experts=core_model.EXPERTS if "experts" in sys.argv else None,
)  # fmt: skip
saved = config.CheckpointConfig(
    save=None if target == "none" else target, load=None if source == "none" else source, ckpt_format="torch_dist"
)
cfg = config.ConfigContainer(
    model=provider, checkpoint=saved, logger=config.LoggerConfig(), tokenizer=config.TokenizerConfig(),
    train=config.TrainingConfig(train_iters=8, global_batch_size=8, micro_batch_size=1),
    optimizer=config.OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True),
    ddp=config.DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
    scheduler=config.SchedulerConfig(), dataset=config.MockGPTDatasetConfig(
        random_seed=1, seq_length=32, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False
    ),
)  # fmt: skip
running: Any = state.GlobalState()
running._cfg = cfg  # the setter takes over the process's signals
if source != "none":
    step, _ = checkpointing.load_checkpoint(running, [wrapped], optimizer, None)
    if step != 4:
        raise RuntimeError(f"resumed from step {step}")
if target != "none":
    train(wrapped, optimizer)  # type: ignore[name-defined]  # noqa: F821 - made by whoever runs this
    running.train_state.step, running.train_state.consumed_train_samples = 4, 32
    checkpointing.save_checkpoint(running, [wrapped], optimizer, None, 0)
_ = parallel_state, SimpleNamespace
