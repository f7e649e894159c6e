"""Starts jobs of megatron-core 0.17 to 0.19, which differ in parsing arguments and building the model."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args


def predicts_further_tokens(vp_stage: int | None) -> bool:
    """Return whether a stage has layers of multi-token prediction; 0.17 and 0.18 use the configuration."""
    args = get_args()
    if "config" in inspect.signature(mtp_on_this_rank).parameters:
        config = core_transformer_config_from_args(args)
        return bool(mtp_on_this_rank(config, ignore_virtual=False, vp_stage=vp_stage))
    text = args.pipeline_model_parallel_layout
    layout = PipelineParallelLayerLayout.from_str(text, args.pipeline_model_parallel_size) if text else None
    return bool(mtp_on_this_rank(layout, args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage))


def part_of_this_rank(batch: dict[str, Any], group: Any) -> dict[str, Any]:
    """Return the part of the sequence for this context-parallel rank."""
    also = {"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters else {}
    part: dict[str, Any] = get_batch_on_this_cp_rank(batch, cp_group=group, **also)
    return part


def parse_arguments() -> None:
    """Parse the command line, except in 0.17, where `initialize_megatron` does it."""
    arguments: Any = importlib.import_module("megatron.training.arguments")
    if hasattr(arguments, "parse_and_validate_args"):
        arguments.parse_and_validate_args()


def train(build_datasets: Any, forward_step: Any, ranks_with_embeddings: Callable[[list[int]], list[int]]) -> None:
    """Call the release's `pretrain` (megatron/training/training.py) as `pretrain_gpt.py` and `pretrain_hybrid.py` do.

    0.17 parses the command line itself. Since 0.18 the script parses it, and since 0.19 its configuration describes the
    model.
    """
    arguments: Any = importlib.import_module("megatron.training.arguments")
    if not hasattr(arguments, "parse_and_validate_args"):
        begins: tuple[Any, ...] = (build_datasets, build_chunk)
    else:
        args, made_of = arguments.parse_and_validate_args(), importlib.import_module("megatron.training.argument_utils")
        if hasattr(made_of, "gpt_config_from_args"):
            describe = made_of.hybrid_config_from_args if args.hybrid_layer_pattern else made_of.gpt_config_from_args
            config = made_of.pretrain_cfg_container_from_args(args, describe(args))
            begins = (config, build_datasets)
        else:
            begins = (made_of.pretrain_cfg_container_from_args(args), build_datasets, build_chunk)
    pretrain(*begins, ModelType.encoder_or_decoder, forward_step, get_embedding_ranks=ranks_with_embeddings)


def build_chunk(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:  # fmt: skip
    """Build a chunk of the model, as `gpt_builder` of Megatron's repository does."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    with_engine = args.transformer_impl == "transformer_engine"
    layers = get_gpt_decoder_block_spec(
        config, with_engine, normalization=args.normalization, qk_l2_norm=args.qk_l2_norm, vp_stage=vp_stage
    )
    predicting = args.mtp_num_layers and get_gpt_mtp_block_spec(config, layers, with_engine, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=predicting or None,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
