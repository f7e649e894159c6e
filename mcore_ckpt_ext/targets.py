"""What a conversion can write: one class for each format, with the options that this format has.

Sizes are given as Megatron names them. What is left out (None) is taken from the source, or from what is installed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import ClassVar, Literal, TypeAlias

from mcore_ckpt_ext.errors import UsageError, shortened
from mcore_ckpt_ext.job.releases import HAS_KNOWN_FORMATS
from mcore_ckpt_ext.job.stated import stated_arguments
from mcore_ckpt_ext.versions import NEWEST, OLDEST, Version, parse_version

SHARD_BYTES = 5 * 10**9
DTYPES = ("float32", "bfloat16", "float16")
LAYER_SPECS = ("transformer_engine", "local")
LOOPS = ("megatron", "bridge")
EXPORTED_KINDS = ("weight", "fp32_param")
QUANTIZATIONS = ("fp8-block",)

LayerSpec: TypeAlias = Literal["transformer_engine", "local"]
Loop: TypeAlias = Literal["megatron", "bridge"]
Quantization: TypeAlias = Literal["fp8-block"]


class _Target:
    """What a conversion needs to know of a format, whatever its options are.

    Attributes:
        is_model_folder: whether it is a folder of transformers or of peft, without place for a job.
        for_adam: whether its optimizer is Adam's, with all of its state.
        for_any_optimizer: whether parameters may differ in what state they have.
        whole_states: whether optimizers that keep whole parameters hold all of the state where the source has such.
        places_mtp: whether it says which rank holds the layers that predict further tokens.
    """

    is_model_folder: ClassVar[bool] = False
    for_adam: ClassVar[bool] = False
    for_any_optimizer: ClassVar[bool] = False
    whole_states: ClassVar[bool] = False
    places_mtp: ClassVar[bool] = True

    @property
    def for_bridge(self) -> bool:
        """Whether Megatron-Bridge will read it."""
        return False

    @property
    def weights_alone(self) -> bool:
        """Whether nothing but weights is taken from the source."""
        return False

    @property
    def reads(self) -> Sequence[str | os.PathLike[str]]:
        """Folders beside the source that are read."""
        return ()


@dataclass(frozen=True, kw_only=True)
class TorchDist(_Target):
    """Megatron's `torch_dist`, in the optimizer format that stock Megatron resumes under any layout.

    Attributes:
        megatron_version: the version that will read it; by default the installed one, else the newest known.
        expert_model_parallel_size: of the job that will read it; only says whether experts have an optimizer of their
            own.
        transformer_impl: layer spec of the job that will read it, whose names and extra states differ; by default that
            of the source, and Transformer Engine's for a Hugging Face one.
        loop: the training loop that will read it: Megatron's own, or Megatron-Bridge, whose checkpoints have
            `run_config.yaml` and `train_state.pt` instead of Megatron's arguments.

    Example:
        >>> convert("run", "torch_dist", TorchDist(megatron_version="0.13.1")).files
        6
        >>> open_checkpoint("torch_dist").optimizer_format
        'fully_sharded_model_space'
    """

    name: ClassVar[str] = "torch_dist"

    megatron_version: str | None = None
    expert_model_parallel_size: int | None = None
    transformer_impl: LayerSpec | None = None
    loop: Loop = "megatron"

    @property
    def for_bridge(self) -> bool:
        """Whether Megatron-Bridge will read it."""
        return self.loop == "bridge"

    def __post_init__(self) -> None:
        """Check what can be checked without a source.

        Raises:
            UsageError: a value makes no sense.
        """
        _check_sizes(expert_model_parallel_size=self.expert_model_parallel_size)
        _check_choice("transformer_impl", self.transformer_impl, LAYER_SPECS)
        _check_choice("loop", self.loop, LOOPS)
        version_number(self.megatron_version)


@dataclass(frozen=True, kw_only=True)
class Legacy(_Target):
    """Megatron's legacy format `torch`: the files of each model-parallel rank of one layout.

    Attributes:
        megatron_version: the version that will read it; by default the installed one, else the newest known.
        tensor_model_parallel_size: of the job that will read it; by default that of the source.
        pipeline_model_parallel_size: likewise.
        virtual_pipeline_model_parallel_size: model chunks per pipeline rank, likewise.
        expert_model_parallel_size: likewise.
        vocab_size: the tokenizer's size, to pad the vocabulary as that job pads it.
        transformer_impl: layer spec of the job that will read it, whose names and extra states differ; by default that
            of the source, and Transformer Engine's for a Hugging Face one.

    Example:
        >>> report = convert("run", "legacy", Legacy(tensor_model_parallel_size=1, pipeline_model_parallel_size=4))
        >>> str(open_checkpoint("legacy").layout)
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

    def __post_init__(self) -> None:
        """Check what can be checked without a source.

        Raises:
            UsageError: a value makes no sense.
        """
        _check_sizes(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=self.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            vocab_size=self.vocab_size,
        )
        _check_choice("transformer_impl", self.transformer_impl, LAYER_SPECS)
        version_number(self.megatron_version)


@dataclass(frozen=True, kw_only=True)
class HuggingFace(_Target):
    """A folder that `transformers` loads; it has no optimizer.

    Attributes:
        vocab_size: tokens without Megatron's padding; by default from the tokenizer, or from the arguments.
        tokenizer: the folder of a tokenizer or model whose small files are copied.
        dtype: of all floating-point tensors; by default as stored.
        kind: what is exported: `weight`, or `fp32_param` for the optimizer's masters.
        max_shard_size: the most bytes of tensors that a file holds, unless it is one tensor.
        pickled: `pytorch_model.bin` instead of safetensors.
        quantize: `fp8-block` for weights of linear layers in fp8 with a scale for each block of 128 x 128.
        lora_alpha: of adapters, which are written for peft, where nothing beside the checkpoint tells it.
        arguments: `NAME=VALUE` of the job's arguments as its model was computed, where the checkpoint cannot tell.

    Example:
        >>> convert("run", "hf", HuggingFace(dtype="float16")).notes[0]
        'the model is a Llama'
        >>> open_checkpoint("hf").tensor("weight", "decoder.final_layernorm.weight").dtype
        torch.float16
    """

    name: ClassVar[str] = "hf"
    is_model_folder: ClassVar[bool] = True
    transformer_impl: ClassVar[None] = None

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
        """Whether nothing but weights is taken from the source; masters are state of an optimizer."""
        return self.kind == "weight"

    @property
    def reads(self) -> Sequence[str | os.PathLike[str]]:
        """Folders beside the source that are read."""
        return () if self.tokenizer is None else (self.tokenizer,)

    def __post_init__(self) -> None:
        """Check what can be checked without a source.

        Raises:
            UsageError: a value makes no sense.
        """
        stated_arguments(self.arguments)
        _check_sizes(vocab_size=self.vocab_size, max_shard_size=self.max_shard_size, lora_alpha=self.lora_alpha)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("kind", self.kind, EXPORTED_KINDS)
        _check_choice("quantize", self.quantize, QUANTIZATIONS)
        if self.quantize is not None and self.pickled:
            raise UsageError(
                "quantised weights are written as safetensors only", found="--bin and --quantize",
                helps="leave one of them out",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Canonical(_Target):
    """The layout-free view itself, in safetensors and one JSON file, for other people's tools.

    Attributes:
        transformer_impl: the layer spec under whose names it is written; by default that of the source, and Transformer
            Engine's for a Hugging Face one.

    Example:
        >>> report = convert("run", "canonical", Canonical())
        >>> sorted(path.name for path in report.destination.glob("*.safetensors"))
        ['canonical-00001-of-00001.safetensors']
    """

    name: ClassVar[str] = "canonical"
    for_any_optimizer: ClassVar[bool] = True

    transformer_impl: LayerSpec | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a source.

        Raises:
            UsageError: a value makes no sense.
        """
        _check_choice("transformer_impl", self.transformer_impl, LAYER_SPECS)


@dataclass(frozen=True, kw_only=True)
class FsdpDtensor(_Target):
    """Megatron's `fsdp_dtensor`, which a job with `--use-megatron-fsdp` resumes.

    Attributes:
        megatron_version: the version that will read it; by default the installed one, else the newest known.
        expert_model_parallel_size: of the job that will read it; only says whether experts have parameter groups of
            their own.
        transformer_impl: layer spec of the job that will read it, for a Hugging Face source: its names differ.

    Example:
        >>> convert("run", "fsdp", FsdpDtensor(megatron_version="0.19.0")).files
        4
        >>> open_checkpoint("fsdp").format
        'fsdp_dtensor'
    """

    name: ClassVar[str] = "fsdp_dtensor"
    for_adam: ClassVar[bool] = True

    megatron_version: str | None = None
    expert_model_parallel_size: int | None = None
    transformer_impl: LayerSpec | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a source.

        Raises:
            UsageError: a value makes no sense.
        """
        _check_sizes(expert_model_parallel_size=self.expert_model_parallel_size)
        _check_choice("transformer_impl", self.transformer_impl, LAYER_SPECS)
        version_number(self.megatron_version)


Target: TypeAlias = TorchDist | Legacy | HuggingFace | Canonical | FsdpDtensor
TARGETS: dict[str, type[TorchDist] | type[Legacy] | type[HuggingFace] | type[Canonical] | type[FsdpDtensor]] = {
    target.name: target for target in (TorchDist, Legacy, HuggingFace, Canonical, FsdpDtensor)
}
"""By the name that `mcore-ckpt convert --to` knows them by."""


def version_number(version: str | None) -> Version:
    """Major and minor number of a version of Megatron; None is the installed one, else the newest known.

    Raises:
        UsageError: it is no version, or none that is known or follows those.
    """
    text = installed_version() if version is None else version
    found = parse_version(text)
    if found is None:
        shown = shortened(repr(text), 40)
        raise UsageError("that is not a version of Megatron", found=shown, expected="for example 0.16.1")
    if not HAS_KNOWN_FORMATS.is_of(found):
        expected = f"{OLDEST} to {NEWEST}, or what follows it"
        raise UsageError("nothing is known of that version of Megatron", found=str(found), expected=expected)
    return found


def installed_version() -> str:
    """The version of the installed megatron-core, else the newest known."""
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return str(NEWEST)


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise UsageError(f"{name} has to be a whole number of 1 or more", found=repr(size))


def _check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise UsageError(f"{name} is not one of its choices", found=repr(value), expected=", ".join(choices))
