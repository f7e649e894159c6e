"""Options for writing a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from typing_extensions import override

from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.formats.target import Target, check_choice, check_sizes
from mcore_ckpt_ext.job.assignments import parse_assignments

SHARD_BYTES = 5 * 10**9
DTYPES = ("float32", "bfloat16", "float16")
EXPORTED_KINDS = ("weight", "fp32_param")
QUANTIZATIONS = ("fp8-block",)
Quantization: TypeAlias = Literal["fp8-block"]


@dataclass(frozen=True, kw_only=True)
class HuggingFace(Target):
    """Write a folder that `transformers` loads; it has no optimizer.

    Attributes:
        vocab_size: tokens without Megatron's padding; by default from the tokenizer, or from the arguments.
        tokenizer: the folder of a tokenizer or model whose small files are copied.
        dtype: the dtype of all floating-point tensors; by default as stored.
        kind: the values to export: `weight`, or `fp32_param` for the optimizer's masters.
        max_shard_size: the most bytes of tensors in a file, unless it contains one tensor.
        pickled: True for `pytorch_model.bin` instead of safetensors.
        quantize: `fp8-block` for weights of linear layers in fp8 with a scale for each block of 128 x 128.
        lora_alpha: alpha of the adapters, which are written for peft, if the checkpoint does not store it.
        arguments: `NAME=VALUE` of arguments used in training that are missing from the checkpoint.

    Example:
        >>> convert("run", "hf", HuggingFace(dtype="float16")).notes[0]
        'model family: Llama'
        >>> open_checkpoint("hf").tensor("weight", "decoder.final_layernorm.weight").dtype
        torch.float16
    """

    name: ClassVar[str] = "hf"
    is_model_folder: ClassVar[bool] = True
    holds_adapters: ClassVar[bool] = True

    vocab_size: int | None = None
    tokenizer: str | os.PathLike[str] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    kind: Literal["weight", "fp32_param"] = "weight"
    max_shard_size: int = SHARD_BYTES
    pickled: bool = False
    quantize: Quantization | None = None
    lora_alpha: int | None = None
    arguments: Sequence[str] = ()

    @property
    def weights_alone(self) -> bool:
        """True if only weights are taken from the source; masters are state of an optimizer."""
        return self.kind == "weight"

    @property
    def reads(self) -> Sequence[str | os.PathLike[str]]:
        """Return additional folders to read."""
        return () if self.tokenizer is None else (self.tokenizer,)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        parse_assignments(self.arguments)
        check_sizes(lora_alpha=self.lora_alpha)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("kind", self.kind, EXPORTED_KINDS)
        check_choice("quantize", self.quantize, QUANTIZATIONS)
        if self.quantize is not None and self.pickled:
            raise UsageError(
                "quantized weights are written as safetensors only",
                found="--bin and --quantize",
                hint="leave one of them out",
            )
