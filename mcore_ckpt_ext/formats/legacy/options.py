"""Options for writing legacy files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_ckpt_ext.formats.target import LayerSpec, Target


@dataclass(frozen=True, kw_only=True)
class Legacy(Target):
    """Write Megatron's legacy format `torch`: the files of each model-parallel rank of one layout.

    Attributes:
        megatron_version: the version that will read it; by default the installed one, or else the newest known one.
        tensor_model_parallel_size: the size in the job that will read it; by default the source's.
        pipeline_model_parallel_size: the same for pipeline parallelism.
        virtual_pipeline_model_parallel_size: the same for model chunks per pipeline rank.
        expert_model_parallel_size: the same for expert parallelism.
        vocab_size: the tokenizer's size, to pad the vocabulary as that job pads it.
        transformer_impl: the layer spec of the job that will read it, because names and extra states differ; by default
            the source's, or Transformer Engine's for a Hugging Face folder.

    Example:
        >>> report = convert("run", "legacy", Legacy(tensor_model_parallel_size=1, pipeline_model_parallel_size=4))
        >>> str(open_checkpoint("legacy").job.layout)
        'TP1 x PP4 x DP2'
        >>> report.notes[-1]
        'the state of the random generators belongs to other ranks: resume with --no-load-rng'
    """

    name: ClassVar[str] = "legacy"
    for_adam: ClassVar[bool] = True
    whole_states: ClassVar[bool] = True
    places_mtp: ClassVar[bool] = False

    megatron_version: str | None = None
    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    expert_model_parallel_size: int | None = None
    vocab_size: int | None = None
    transformer_impl: LayerSpec | None = None
