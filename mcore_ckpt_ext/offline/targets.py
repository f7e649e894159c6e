"""The formats that a conversion can write, by the name the user gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.formats.canonical import canonical_output
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.huggingface import HuggingFaceCheckpoint
from mcore_ckpt_ext.formats.huggingface_folder import TOKENIZER_FOLDER
from mcore_ckpt_ext.formats.huggingface_target import HuggingFaceOptions, HuggingFaceTarget
from mcore_ckpt_ext.formats.legacy_target import LegacyTarget
from mcore_ckpt_ext.formats.torch_dist_target import TorchDistTarget
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.planning.output import Output, OutputFile

NEWEST = "0.19"
HUGGING_FACE = "hf"
RUN_CONFIG = "run_config.yaml"
"""The file by which Megatron-Bridge knows its checkpoints."""
FORMATS = ("torch_dist", "legacy", HUGGING_FACE, "canonical")


def installed_version() -> str:
    """The version of the installed megatron-core, else the newest known."""
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return NEWEST


@dataclass(frozen=True)
class TargetOptions:
    """What to write for; names as Megatron spells them, None for what the source has."""

    megatron_version: str = NEWEST
    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    expert_model_parallel_size: int | None = None
    vocab_size: int | None = None
    hugging_face: HuggingFaceOptions = field(default_factory=HuggingFaceOptions)

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor number.

        Raises:
            UnsupportedCheckpointError: it is no version.
        """
        parts = self.megatron_version.removeprefix("core_v").split(".")
        if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
            raise UnsupportedCheckpointError(
                "that is no version of Megatron", found=self.megatron_version, expected="for example 0.16.1"
            )
        return int(parts[0]), int(parts[1])


@dataclass(frozen=True)
class Target:
    """What is to be written: the files, the iteration folder they belong into (none: the destination itself).

    `reads_optimizer`: more than the weights is taken from the source.
    `reads_back` opens what was written; of the source's tensors it may lack `left_out`, and other `kinds`.
    """

    output: Output
    folder: str
    notes: Sequence[str]
    kinds: Sequence[str]
    left_out: Sequence[str] = ()
    reads_optimizer: bool = True
    reads_back: Callable[[Path], Checkpoint] = open_checkpoint


# Arguments that say how layers are spread over pipeline ranks, and mean nothing for another number of ranks.
_SPREADING = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
)  # fmt: skip


def reader_arguments(checkpoint: Checkpoint, options: TargetOptions) -> dict[str, Any]:
    """Megatron's arguments of the job that will read: the writer's, with another layout."""
    arguments, source = dict(checkpoint.args), checkpoint.layout
    tensor = options.tensor_model_parallel_size or source.tensor
    vocabulary = options.vocab_size or checkpoint.vocabulary
    pipeline = options.pipeline_model_parallel_size or source.pipeline
    expert = options.expert_model_parallel_size or source.expert
    virtual = options.virtual_pipeline_model_parallel_size
    if virtual is None:
        virtual = source.virtual_pipeline if pipeline == source.pipeline else 1
    ranks = tensor * pipeline * source.context
    data = max(1, source.world // ranks)
    if pipeline != source.pipeline:
        arguments |= {name: None for name in _SPREADING if name in arguments}
    arguments |= {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "transformer_pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": tensor,
        "data_parallel_size": data,
        "world_size": ranks * data,
        "padded_vocab_size": _padded_vocabulary(arguments, tensor, vocabulary),
        "ckpt_format": "torch",
        "use_dist_ckpt": False,
        "use_distributed_optimizer": True,
    }
    return arguments


def _padded_vocabulary(arguments: Mapping[str, Any], tensor: int, vocabulary: int | None) -> int:
    """Rows of the embedding: `_vocab_size_with_padding` (megatron/training/tokenizer/tokenizer.py, 0.7 to 0.19).

    Without the true size, which no checkpoint records, the stored one is kept, or padded further where it does not
    divide.
    """
    multiple = int(arguments.get("make_vocab_size_divisible_by") or 128) * tensor
    stored = int(arguments["padded_vocab_size"])
    if vocabulary is None:
        return stored if stored % tensor == 0 else -(-stored // multiple) * multiple
    return -(-vocabulary // multiple) * multiple


def lay_out_target(checkpoint: Checkpoint, to: str, options: TargetOptions) -> Target:
    """Lay out the files of a conversion.

    Raises:
        UnsupportedCheckpointError: the format cannot hold this checkpoint.
    """
    if to == HUGGING_FACE:
        return _hugging_face(checkpoint, options.hugging_face)
    folder = "release" if checkpoint.released else f"iter_{checkpoint.iteration:07d}"
    kinds = checkpoint.kinds()
    notes = checkpoint.notices()
    if to == "torch_dist":
        expert = options.expert_model_parallel_size
        experts_apart = checkpoint.experts_apart if expert is None else expert > 1
        target = TorchDistTarget(checkpoint, options.version, experts_apart)
        output = _with_companions(target.output(), checkpoint)
        if isinstance(checkpoint, HuggingFaceCheckpoint):
            text = checkpoint.run_config().encode()
            output = Output([OutputFile(RUN_CONFIG, len(text), ((0, text),)), *output.files], output.records)
        return Target(output, folder, [*target.notes, *notes], kinds)
    if to == "canonical":
        return Target(canonical_output(checkpoint), "", notes, kinds)
    if to == "legacy":
        legacy = LegacyTarget(checkpoint, reader_arguments(checkpoint, options), options.version)
        return Target(_with_companions(legacy.output(), checkpoint), folder, [*legacy.notes, *notes], kinds)
    raise UnsupportedCheckpointError("unknown format", found=to, expected=", ".join(FORMATS))


def _hugging_face(checkpoint: Checkpoint, options: HuggingFaceOptions) -> Target:
    target = HuggingFaceTarget(checkpoint, options)
    spec = target.fit.arguments["transformer_impl"]

    def reads_back(folder: Path) -> Checkpoint:
        return open_checkpoint(folder, family=target.fit.family, transformer_impl=spec)

    output = target.output()
    return Target(output, "", target.notes, (WEIGHT,), target.left_out, options.kind != WEIGHT, reads_back)


def _with_companions(output: Output, checkpoint: Checkpoint) -> Output:
    """The same, and the model's small files where Megatron keeps its tokenizer."""
    small = [
        OutputFile(f"{TOKENIZER_FOLDER}/{name}", len(content), ((0, content),))
        for name, content in checkpoint.companions().items()
    ]
    return Output([*small, *output.files], output.records)
