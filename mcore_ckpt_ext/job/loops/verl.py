"""Reads the job description of verl's checkpoints.

The folder of a step contains `dist_ckpt/`, which Megatron Core writes without arguments, and other files. Source:
verl/utils/checkpoint/megatron_checkpoint_manager.py and verl/utils/megatron_utils.py of the development head of 29
January 2026. `transformer_config.json` has the fields of `TransformerConfig`. `huggingface/` has the model's
configuration, its tokenizer and, without `use_dist_checkpointing`, the only copy of its weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.loops.transformer import model_arguments

DISTRIBUTED = "dist_ckpt"
"""The folder of the distributed checkpoint."""
TRANSFORMER_CONFIG = "transformer_config.json"
MODEL = "huggingface"
"""The folder of the model's configuration and tokenizer."""
STEP = re.compile(r"global_step_(\d{1,18})", re.ASCII)
"""The name of a step's folder."""


def job_arguments(content: Any, source: str) -> JobArguments:
    """Return the arguments in a `transformer_config.json`.

    Parameters and errors are those of `bridge.job_arguments`.
    """
    if not isinstance(content, Mapping) or "num_layers" not in content:
        raise ValueError("it has no field num_layers")
    return JobArguments.of(model_arguments(content), source=source, is_complete=False)
