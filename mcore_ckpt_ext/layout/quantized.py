"""Determines the quantized parameters of a job with fp8 or fp4 primary weights.

They have separate gradient buffers.

Transformer Engine quantizes the weights of its linear layers, including grouped ones. Norms, biases, embeddings, the
router and Megatron's own output layer are not quantized (`TransformerEngineBaseModule.reset_parameters`,
transformer_engine/pytorch/module/base.py, 2.20.2). With `--first-last-layers-bf16` some layers are not quantized
(`get_fp8_context`, megatron/core/fp8_utils.py, and fp4_utils.py, core_v0.12.1 to 0.19.2).
"""

from __future__ import annotations

import re

from mcore_ckpt_ext.job.job_arguments import JobArguments

QUANTIZED = "uint8"
"""The parameter dtype of a gradient buffer of quantized weights (param_and_grad_buffer.py, core_v0.9.0 to 0.19.2)."""

_LINEAR = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?(?:linear_\w+|in_proj|out_proj|eh_proj)\.weight$")
_DECODER = re.compile(r"(?:^|\.)decoder\.layers\.")


def quantizes(arguments: JobArguments) -> bool:
    """Return whether a job has primary weights in fp8 or fp4."""
    return bool(arguments.fp8_param_gather or arguments.fp4_param_gather)


def is_quantized(name: str, arguments: JobArguments) -> bool:
    """Return whether the weight of this model-space name is quantized in a job with these arguments."""
    match = _LINEAR.search(name) if quantizes(arguments) else None
    if match is None:
        return False
    if not arguments.first_last_layers_bf16 or not _DECODER.search(name):
        return True
    # Megatron's defaults if they are not set (transformer_config.py, core_v0.12.1 to 0.19.2).
    start = 1 if arguments.num_layers_at_start_in_bf16 is None else arguments.num_layers_at_start_in_bf16
    end = 1 if arguments.num_layers_at_end_in_bf16 is None else arguments.num_layers_at_end_in_bf16
    return start <= int(match[1]) < (arguments.num_layers or 0) - end
