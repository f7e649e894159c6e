"""A training job of the self-test, with Megatron's functions, like `pretrain` on synthetic data.

`setup_model_and_optimizer` sets up model and optimizer and loads a checkpoint, `train_step` trains, `save_checkpoint`
saves (megatron/training/training.py and checkpointing.py; the calls are the same for core_v0.17.0 to 0.19.2).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets import utils as dataset_utilities
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_model_config
from megatron.training import arguments as training_arguments
from megatron.training import checkpointing, get_args, initialize_megatron, training
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.async_utils import maybe_finalize_async_save

_LOSS = "lm loss"


class Training:
    """A job with a command line: it is set up at once, then trained step by step."""

    def __init__(self, words: Sequence[str]) -> None:
        """Set up Megatron, the model and the optimizer; resume if the command line has `--load`.

        Args:
            words: the words of the command line.
        """
        sys.argv = [sys.argv[0], *words]
        # No dataset is read. `initialize_megatron` compiles the helper for datasets, and ends the process where PyPI's
        # Megatron is installed, which lacks the Makefile (megatron/core/datasets/utils.py, core_v0.17.0 to 0.19.2).
        dataset_utilities.compile_helpers = _do_nothing
        if hasattr(training_arguments, "parse_and_validate_args"):  # since 0.18; before, initialize_megatron parses
            training_arguments.parse_and_validate_args()
        initialize_megatron()
        self.arguments = get_args()
        self.model, self.optimizer, self.scheduler = training.setup_model_and_optimizer(
            model_type=ModelType.encoder_or_decoder, model_provider_func=_model
        )
        self.config = get_model_config(self.model[0])
        # `train` sets them, too (megatron/training/training.py); without the second, gradients would not be reduced.
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        for chunk in self.model:
            chunk.train()
        iterators = [RerunDataIterator(self._samples()) for _ in self.model]
        self._batches = iterators if len(iterators) > 1 else iterators[0]

    @property
    def chunks(self) -> Sequence[Any]:
        """The model without its wrappers."""
        return [_unwrap(chunk) for chunk in self.model]

    def step(self) -> float | None:
        """Train one iteration; return its loss on the ranks of the last pipeline stage, else None."""
        self.arguments.curr_iteration = self.arguments.iteration
        losses, *_ = training.train_step(
            _forward_step,
            self._batches,
            self.model,
            self.optimizer,
            self.scheduler,
            self.config,
            training.get_forward_backward_func(),
            iteration=self.arguments.iteration,
        )
        self.arguments.iteration += 1
        self.arguments.consumed_train_samples += self.arguments.global_batch_size
        return float(losses[_LOSS]) if losses else None

    def save(self) -> None:
        """Save a checkpoint; an asynchronous one is complete after `finish`."""
        checkpointing.save_checkpoint(self.arguments.iteration, self.model, self.optimizer, self.scheduler, 0)

    def finish(self) -> None:
        """Wait until an asynchronous save is complete."""
        maybe_finalize_async_save(blocking=True)

    def close(self) -> None:
        """Reset Megatron's global state, so that the next job begins as in a process of its own."""
        maybe_finalize_async_save(blocking=True, terminate=True)
        self.model = self.optimizer = self.scheduler = None
        training.destroy_global_state()
        groups = list(torch.distributed.distributed_c10d._world.pg_map)
        for group in groups:
            if group is not torch.distributed.group.WORLD:
                torch.distributed.destroy_process_group(group)

    def _samples(self) -> Iterator[torch.Tensor]:
        """Yield this data-parallel rank's micro batches, which depend only on the number of consumed samples."""
        arguments = self.arguments
        ranks = parallel_state.get_data_parallel_world_size()
        rank = parallel_state.get_data_parallel_rank()
        device = next(self.model[0].parameters()).device
        while True:
            for number in range(get_num_microbatches()):
                first = arguments.consumed_train_samples + (number * ranks + rank) * arguments.micro_batch_size
                samples = torch.arange(first, first + arguments.micro_batch_size).unsqueeze(1)
                # Every sample counts from its own first token in its own steps, which is learned quickly, so that
                # losses fall.
                places = torch.arange(arguments.seq_length + 1)
                yield ((samples * 7 + places * (1 + samples % 3)) % arguments.vocab_size).to(device)


def _do_nothing() -> None:
    """Compile nothing."""


def _unwrap(chunk: Any) -> Any:
    return _unwrap(chunk.module) if hasattr(chunk, "module") else chunk


def _model(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any) -> Any:
    """Build a chunk of the model, as `gpt_builder` of Megatron's repository does."""
    arguments = get_args()
    config = core_transformer_config_from_args(arguments)
    with_engine = arguments.transformer_impl == "transformer_engine"
    layers = get_gpt_decoder_block_spec(
        config, use_transformer_engine=with_engine, normalization=arguments.normalization, vp_stage=vp_stage
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=arguments.padded_vocab_size,
        max_sequence_length=arguments.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        position_embedding_type=arguments.position_embedding_type,
        vp_stage=vp_stage,
    )


Loss = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


def _forward_step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Loss]:
    """Run a chunk of the model on its next micro batch."""
    tokens = next(batches)
    inputs = tokens[:, :-1].contiguous()
    labels = tokens[:, 1:].contiguous()
    places = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    return model(inputs, places, None, labels=labels), partial(_loss, tokens=labels.numel())


def _loss(output: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = output.float().sum()
    count = torch.tensor(tokens, dtype=torch.int, device=output.device)
    return total, count, {_LOSS: torch.stack([total.detach(), count.float()])}
