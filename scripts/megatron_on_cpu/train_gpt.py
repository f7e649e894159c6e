"""Trains a small GPT on Megatron's mock data with the genuine ``megatron.training.pretrain`` (0.17 to 0.19).

The PyPI package of Megatron-LM lacks ``pretrain_gpt.py``. This script replaces it: it takes the same arguments, builds
the model with Megatron, and uses the same samples, so it has the same losses. Context parallelism needs an attention
that supports it; the local spec's does not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron_on_cpu.release_api import part_of_this_rank, predicts_further_tokens, train


def takes_samples(vp_stage: int | None) -> bool:
    """Return whether a stage reads tokens or labels: the first, the last, and the one with MTP layers."""
    return predicts_further_tokens(vp_stage) or is_first_or_last_pipeline_stage(vp_stage)


def build_datasets(samples: list[int], vp_stage: int | None = None) -> Any:
    """Build the train, validation and test sets on the stages that read tokens or labels."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    reads_data = partial(takes_samples, vp_stage)
    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, reads_data, config).build()


# Every rank builds its own datasets, so tensor-parallel ranks need not broadcast samples.
build_datasets.is_distributed = True  # type: ignore[attr-defined]


def ranks_with_embeddings(ranks: list[int]) -> list[int]:
    """Return the pipeline ranks with a copy of the word embeddings, whose gradients are summed."""
    args = get_args()
    holding = {ranks[0], *get_mtp_ranks(ranks, core_transformer_config_from_args(args))}
    return sorted(holding if args.untie_embeddings_and_output_weights else {*holding, ranks[-1]})


def summed_loss(loss_mask: Any, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the tokens' losses; Megatron divides by the number of tokens, over all microbatches and ranks."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Run the model chunk on its next microbatch."""
    batch: dict[str, Any] = {}
    if takes_samples(get_attr_wrapped_model(model, "vp_stage")):
        batch = {name: values.cuda() for name, values in next(data_iterator).items()}
    if batch and get_args().context_parallel_size > 1:
        batch = part_of_this_rank(batch, get_context_parallel_group())
    loss_mask = batch.get("loss_mask")
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=loss_mask,
    )
    return output, partial(summed_loss, loss_mask)


def main() -> None:
    """Train as the command line says."""
    train(build_datasets, forward_step, ranks_with_embeddings)


if __name__ == "__main__":
    main()
