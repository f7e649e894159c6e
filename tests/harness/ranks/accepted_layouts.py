"""Lists the layouts that real Megatron accepts, and the parameters of each pipeline stage; one process, no ranks.

    python accepted_layouts.py CASES.json RESULTS.json [MEGATRON_CHECKOUT]

A case is a list of Megatron's arguments and a world size. `validate_args`, the process groups (of torch's fake
backend), the model and its sharded state dict, without which it is neither saved nor loaded, are Megatron's own. The
result of a case is the error that it ended with, or the parameters of each pipeline rank: [[name, shape], ...] by model
chunk. Other cases are matrices that a layer-wise optimizer packs for a number of ranks, with the shard of each and the
size of shards as a result; null for releases without a parameter layout.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if len(sys.argv) > 3:
    sys.path.insert(0, sys.argv[3])

from megatron_on_cpu import compat, redirect

redirect.install()

import torch  # noqa: E402 - after the redirection
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

compat.apply()

import hybrid_layers  # noqa: E402
import megatron.core  # noqa: E402
from megatron.core import num_microbatches_calculator, parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.training import arguments as megatron_arguments  # noqa: E402

_PLAIN = (int, float, str, bool, list, type(None))

# The local attention replaces Transformer Engine's, which alone supports context parallelism.
_build_attention = DotProductAttention.__init__


def _build_attention_of(self: Any, config: Any, *positional: Any, **keywords: Any) -> None:
    ranks = config.context_parallel_size
    if config.transformer_impl == "transformer_engine":
        config.context_parallel_size = 1
    try:
        _build_attention(self, config, *positional, **keywords)
    finally:
        config.context_parallel_size = ranks


DotProductAttention.__init__ = _build_attention_of


def _parsed(words: list[str], world: int, rank: int) -> Any:
    os.environ |= {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    sys.argv = ["pretrain_gpt.py", *words]
    args = megatron_arguments.parse_args()
    megatron_arguments.validate_args(args)
    return args


def _padded(args: Any) -> int:
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-args.vocab_size // multiple) * multiple


def _chunks(args: Any, world: int, rank: int) -> list[list[tuple[str, list[int]]]]:
    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
            order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        )
        model_parallel_cuda_manual_seed(1)
        return [_chunk(args, stage) for stage in range(args.virtual_pipeline_model_parallel_size or 1)]
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _chunk(args: Any, stage: int) -> list[tuple[str, list[int]]]:
    config = megatron_arguments.core_transformer_config_from_args(args)
    virtual = stage if args.virtual_pipeline_model_parallel_size else None
    common = {
        "vocab_size": _padded(args),
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
    }
    if pattern := getattr(args, "hybrid_layer_pattern", None) or args.hybrid_override_pattern:
        return _named(_hybrid(config, pattern, virtual, common))
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=virtual)
    else:
        spec = get_gpt_layer_local_spec(
            args.num_experts, False, args.qk_layernorm, args.multi_latent_attention, normalization=args.normalization
        )
    mtp = None
    if args.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=virtual)
    model = GPTModel(
        config,
        spec,
        mtp_block_spec=mtp,
        vp_stage=virtual,
        **common,
    )
    return _named(model)


def _hybrid(config: Any, pattern: str, virtual: int | None, common: dict[str, Any]) -> torch.nn.Module:
    """Build a hybrid model as hybrid_builders.py does, or mamba_builders.py up to core_v0.16."""
    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:
        from megatron.core.models.mamba import MambaModel

        return MambaModel(config, hybrid_layers.hybrid_stack, hybrid_override_pattern=pattern, **common)
    return HybridModel(config, hybrid_layers.hybrid_stack, hybrid_layer_pattern=pattern, vp_stage=virtual, **common)


def _named(model: Any) -> list[tuple[str, list[int]]]:
    # A save passes this metadata (`_build_sharded_state_dict_metadata`); multi-token prediction needs it up to 0.16.
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    model.sharded_state_dict(metadata={"dp_cp_group": group})
    return [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]


def _packed(shapes: list[list[int]], ranks: int) -> tuple[list[int], int] | None:
    """Return the shard of each matrix, in the order in which Megatron packs equal ones, and the size of the shards."""
    lay_out = getattr(LayerWiseDistributedOptimizer, "_compute_per_buffer_param_layout", None)
    if lay_out is None:
        return None
    matrices = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    found = lay_out(matrices[::-1], None, ranks, SimpleNamespace(pad_buckets_for_high_nccl_busbw=False))
    ((start, stop),) = found.bucket_indices
    size = (stop - start) // ranks
    return [found.param_index_map[matrix][0] // size for matrix in matrices], size


def _judged(case: dict[str, Any]) -> dict[str, Any]:
    words, world = case["arguments"], case["world"]
    try:
        args = _parsed(words, world, 0)
        num_microbatches_calculator.unset_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(
            0, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
        )
        stages = []
        for pipeline in range(args.pipeline_model_parallel_size):
            rank = pipeline * (world // args.pipeline_model_parallel_size)
            stages.append(_chunks(args, world, rank))
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    plain = {name: value for name, value in vars(args).items() if isinstance(value, _PLAIN)}
    return {"stages": stages, "arguments": plain}


def main() -> None:
    """Evaluate all cases."""
    source, destination = map(Path, sys.argv[1:3])  # Megatron's parser gets other arguments below
    asked = json.loads(source.read_text())
    answer = {
        "version": megatron.core.__version__,
        "results": [_judged(case) for case in asked["cases"]],
        "packed": [_packed(shapes, ranks) for shapes, ranks in asked["matrices"]],
    }
    destination.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
