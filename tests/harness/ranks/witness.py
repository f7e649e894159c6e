"""Builds models from flags with real Megatron, loads their checkpoints, and writes their outputs.

Arguments: a JSON file with the cases, each with `run`, `flags`, `tensor`, `expert`, `tokens` and `answer` (files),
`loss` to request the mean loss of predicting the tokens instead of the logits, and `commands` of `mcore-ckpt` that the
first rank runs before. With `--save` among the flags, the model is saved as it was loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.activations import fast_gelu
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, model_parallel_cuda_manual_seed
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.arguments import add_megatron_arguments, parse_and_validate_args
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.global_vars import destroy_global_vars, get_args
from megatron.training.models.gpt import GPTModelBuilder
from megatron.training.models.hybrid import HybridModelBuilder
from megatron_on_cpu import toy_jobs
from megatron_on_cpu.groups import leave_groups

from mcore_ckpt_ext.cli.main import main as command_line


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    torch.distributed.init_process_group("gloo")
    known = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    Path(sys.argv[1]).with_name("arguments.json").write_text(json.dumps([action.dest for action in known._actions]))
    for case in cases:
        answer = logits(case)
        if torch.distributed.get_rank() == 0:
            torch.save(answer, case["answer"])


def logits(case: dict[str, Any]) -> torch.Tensor:
    """Return the logits `[batch, sequence, vocabulary]` of one case, gathered on every rank, or its loss."""
    for words in case.get("commands", ()):
        if torch.distributed.get_rank() == 0:
            assert command_line(words) == 0
        torch.distributed.barrier()
    model = build(case)
    load_checkpoint([model], None, None)
    if get_args().save:
        save_checkpoint(1, [model], None, None, 0)
    tokens = torch.load(case["tokens"])
    labels = None
    if case.get("loss"):
        tokens, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    model.eval()
    with torch.no_grad():
        if labels is not None:
            return model(tokens, positions, mask, labels=labels).mean()
        return gather_from_tensor_model_parallel_region(model(tokens, positions, mask))


def build(case: dict[str, Any]) -> Any:
    destroy_global_vars()
    destroy_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    leave_groups()
    # Megatron does not shard experts with biases across tensor-parallel ranks.
    expert_tensor = 1 if "--softmax-type" in case["flags"] else case["tensor"]
    layout = [
        "--tensor-model-parallel-size", str(case["tensor"]), "--expert-model-parallel-size", str(case["expert"]),
        "--expert-tensor-parallel-size", str(expert_tensor),
    ]  # fmt: skip
    more = [
        "--tokenizer-type", "NullTokenizer", "--vocab-size", str(case["vocabulary"]), "--micro-batch-size", "1",
        "--global-batch-size", "2", "--load", case["run"], "--mock-data", "--lr", "1e-3", "--train-iters", "1",
        "--seq-length", str(torch.load(case["tokens"]).shape[1]), "--moe-token-dispatcher-type", "alltoall",
        "--no-load-optim", "--no-load-rng",
    ]  # fmt: skip
    # The fusion decides whether the activation is approximated, so the case's own flags apply.
    cpu = [flag for flag in toy_jobs.CPU if flag != "--no-bias-gelu-fusion"]
    sys.argv = [sys.argv[0], *cpu, *layout, *more, *case["flags"]]
    args = parse_and_validate_args()
    parallel_state.initialize_model_parallel(
        case["tensor"], expert_model_parallel_size=case["expert"], expert_tensor_parallel_size=expert_tensor
    )
    model_parallel_cuda_manual_seed(1234)
    if args.hybrid_layer_pattern:
        hybrid = HybridModelBuilder(hybrid_config_from_args(args))
        return hybrid.build_model(ProcessGroupCollection.use_mpu_process_groups())
    config = gpt_config_from_args(args)
    if case.get("as_gemma"):
        return _build_gemma(config)
    return GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())


def _build_gemma(config: Any) -> Any:
    """Build a model as `GemmaModelProvider` of Megatron-Bridge does, with what no flag of Megatron-LM sets.

    Source: gemma/gemma_provider.py and gemma/modules.py, 0.6.2: the activation, and the scale of the embeddings.
    """
    config.transformer.gated_linear_unit, config.transformer.activation_func = True, fast_gelu
    config.transformer.bias_activation_fusion = False
    model = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    scale = config.transformer.hidden_size**0.5
    model.embedding.register_forward_hook(lambda module, inputs, output: output * scale)
    return model


if __name__ == "__main__":
    main()
