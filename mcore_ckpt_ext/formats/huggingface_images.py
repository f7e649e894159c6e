"""Models that also see images, whole: as Megatron-Bridge holds them, and as Hugging Face's folders do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.errors import UnsupportedCheckpointError, some
from mcore_ckpt_ext.families.arguments import ModelArguments, complete
from mcore_ckpt_ext.families.bridge import run_config
from mcore_ckpt_ext.families.family import Family, HuggingFaceTensor
from mcore_ckpt_ext.families.images import IMAGES, PREFIX, Images, kind_of, sections_of, whole_tensor
from mcore_ckpt_ext.families.text_parts import text_config
from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.formats.fresh_states import fresh_extra_states
from mcore_ckpt_ext.formats.huggingface import HuggingFaceCheckpoint
from mcore_ckpt_ext.formats.huggingface_folder import StoredTensor
from mcore_ckpt_ext.formats.huggingface_model import TRANSFORMER_ENGINE
from mcore_ckpt_ext.formats.respelled import Respelled
from mcore_ckpt_ext.model_space.tensors import WEIGHT

_SHOWN = 6
# What a job may choose anew.
_OF_TRAINING = ("attention_dropout", "initializer_range", "max_position_embeddings", "architectures")


class WithImages(HuggingFaceCheckpoint):
    """A folder with what sees images, under the names of Megatron-Bridge's model of the whole."""

    @override
    def _matched(self, stored: Mapping[str, StoredTensor]) -> list[tuple[HuggingFaceTensor, StoredTensor]]:
        if "quantization_config" in self.config:
            raise UnsupportedCheckpointError(
                "a quantised model is not read with what sees images", where=str(self.folder),
                helps="leave --for bridge out for its text, or take the folder as it was released in bf16",
            )  # fmt: skip
        text = [(_below_prefix(tensor), found) for tensor, found in super()._matched(stored)]
        named = {name: self._kind.ours(name) for name in self._images}
        self.left_out = [name for name in self.left_out if named.get(name) is None]
        seeing = [(whole_tensor(name, ours, self._images[name].shape), self._images[name])
                  for name, ours in named.items() if ours is not None]  # fmt: skip
        wrong = self._kind.misfits(self.whole_config, {ours.regions[0].name: ours.shape for ours, _ in seeing})
        if wrong:
            raise UnsupportedCheckpointError(
                "config.json does not describe the tensors that see images", found="; ".join(wrong),
                where=str(self.folder),
            )  # fmt: skip
        return text + seeing

    @property
    def _kind(self) -> Images:
        return IMAGES[self.whole]

    @override
    def run_config(self) -> str:
        return run_config(self.family, complete(self.arguments), self._kind.provider_fields(self.whole_config))

    @override
    def extra_states(self) -> Mapping[str, Any]:
        text = [name.removeprefix(PREFIX) for name in self.names(WEIGHT) if name.startswith(PREFIX)]
        of_engine = self.model.transformer_impl == TRANSFORMER_ENGINE
        return {f"{PREFIX}{name}": state for name, state in fresh_extra_states(text, of_engine).items()}

    @override
    def notices(self) -> list[str]:
        found = [f"of {self.whole}, text and images, for Megatron-Bridge: pretrain_gpt.py has no such model"]
        if self.left_out:
            found.append(f"left out, because Megatron has no place for it: {some(self.left_out, _SHOWN)}")
        return found


class TextBeside(Respelled):
    """A whole of Megatron-Bridge, whose text has the names of a model of its own; those of images stay.

    Attributes:
        kind: the `model_type` of the whole.
        text: the names of its text, as they are here.
    """

    def __init__(self, source: Checkpoint) -> None:
        names = source.names(WEIGHT)
        super().__init__(source, {name: name.removeprefix(PREFIX) for name in names})
        self.kind = kind_of(names) or ""
        self.text = {name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)}

    @cached_property
    @override
    def arguments(self) -> JobArguments:
        # Of positions in a text the three axes are one.
        return self._source.arguments.changed(position_embedding_type="rope")


def with_images(checkpoint: Checkpoint) -> Checkpoint:
    """The whole of a Hugging Face folder that only the text was read of, where it is known how Bridge holds it."""
    if not isinstance(checkpoint, HuggingFaceCheckpoint) or checkpoint.whole not in IMAGES:
        return checkpoint
    return checkpoint.read_again(WithImages)


def text_beside(checkpoint: Checkpoint) -> Checkpoint:
    """A whole of Megatron-Bridge with its text under the names of a model of its own; anything else as it is."""
    return checkpoint if kind_of(checkpoint.names(WEIGHT)) is None else TextBeside(checkpoint)


def seeing_tensors(checkpoint: Checkpoint) -> list[HuggingFaceTensor]:
    """What sees images in a checkpoint that `text_beside` gave; nothing in any other."""
    if not isinstance(checkpoint, TextBeside):
        return []
    images = IMAGES[checkpoint.kind]
    named = {name: images.theirs(name) for name in checkpoint.names(WEIGHT) if name not in checkpoint.text}
    return [whole_tensor(theirs, name, checkpoint.named_tensor(WEIGHT, name).shape)
            for name, theirs in named.items() if theirs is not None]  # fmt: skip


def checked_whole(
    beside: Mapping[str, Any], family: Family, arguments: ModelArguments, checkpoint: Checkpoint,
    seeing: Sequence[HuggingFaceTensor],
) -> dict[str, Any]:  # fmt: skip
    """The `config.json` of a whole: that which lies beside, for what sees images is in no argument.

    Args:
        beside: the `config.json` of a Hugging Face folder.
        family: of the text.
        arguments: of the text.
        checkpoint: one that `text_beside` gave.
        seeing: the tensors that see images.

    Raises:
        UnsupportedCheckpointError: it is of another kind, or describes another model.
    """
    kind = checkpoint.kind if isinstance(checkpoint, TextBeside) else ""
    text = text_config(beside)
    if beside.get("model_type") != kind or text is None:
        raise UnsupportedCheckpointError(
            "what the part of a model is like that sees images, only its config.json says", found=str(beside.get(
            "model_type", "none beside the checkpoint")), expected=f"model_type {kind}",
            where=str(checkpoint.folder), helps="name the folder that it began with: --tokenizer FOLDER",
        )  # fmt: skip
    said, trained = family.config(family.arguments(text)), family.config(arguments)
    wrong = [f"{key} is {said.get(key)!r}, not {value!r}" for key, value in trained.items()
             if key not in _OF_TRAINING and said.get(key) != value]  # fmt: skip
    axes = checkpoint.arguments.stated.get("mrope_section")
    if axes is not None and list(axes) != list(sections_of(beside) or ()):
        wrong.append(f"mrope_section is {sections_of(beside)}, not {axes}")
    wrong += IMAGES[kind].misfits(beside, {tensor.regions[0].name: tensor.shape for tensor in seeing})
    if wrong:
        raise UnsupportedCheckpointError(
            "the config.json beside describes another model than was trained", found="; ".join(wrong[:_SHOWN]),
            where=str(checkpoint.folder), helps="name the folder that it began with: --tokenizer FOLDER",
        )  # fmt: skip
    return {key: value for key, value in beside.items() if key != "dtype"}


def _below_prefix(tensor: HuggingFaceTensor) -> HuggingFaceTensor:
    return replace(tensor, regions=tuple(replace(one, name=f"{PREFIX}{one.name}") for one in tensor.regions))
