"""Whole vision-language models, as Megatron-Bridge stores them and as Hugging Face's folders do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, join_some, with_indefinite_article
from mcore_ckpt_ext.families.bridge import run_config
from mcore_ckpt_ext.families.config_keys import neutral_keys
from mcore_ckpt_ext.families.family import Family, HuggingFaceTensor
from mcore_ckpt_ext.families.text_parts import text_config, turned_stack
from mcore_ckpt_ext.families.vision import PREFIX, VisionTower, sections_of
from mcore_ckpt_ext.families.vision_towers import VISION_TOWERS, vision_model_type
from mcore_ckpt_ext.formats.description import run_config_of
from mcore_ckpt_ext.formats.hugging_face.folder import StoredTensor
from mcore_ckpt_ext.formats.hugging_face.model import TRANSFORMER_ENGINE
from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint
from mcore_ckpt_ext.formats.initial_extra_states import fresh, fresh_extra_states
from mcore_ckpt_ext.formats.parts import WholeModel, lazy
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.views import rename_tensors
from mcore_ckpt_ext.job.loops.transformer import is_plain
from mcore_ckpt_ext.job.model_arguments import ModelArguments, complete
from mcore_ckpt_ext.model_space.names import EXTRA_STATE
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.planning.plan import named_tensor

_SHOWN = 6
_FLOATS = ("bfloat16", "float16", "float32")
_HINT = "pass the folder that training started from: --tokenizer FOLDER"
# Names of stacked experts, which select the rules for them.
_STACKED = tuple(f"model.layers.0.mlp.experts.{projection}_proj" for projection in ("gate_up", "down"))
# Keys of `config.json` that a training job may change.
_OF_TRAINING = ("attention_dropout", "initializer_range", "max_position_embeddings", "architectures")


class VisionLanguageCheckpoint(HuggingFaceCheckpoint):
    """A folder read with its vision part, under the names of Megatron-Bridge's model."""

    @override
    def _match(self, stored: Mapping[str, StoredTensor]) -> list[tuple[HuggingFaceTensor, StoredTensor]]:
        quantized = [name for name, tensor in self._vision.items() if tensor.extent.dtype not in _FLOATS]
        if quantized:
            raise UnsupportedCheckpointError(
                "the vision tower is quantized, which is not supported",
                found=join_some(quantized, 1),
                where=str(self.folder),
                hint="leave --for bridge out for its text, or take the folder as it was released in bf16",
            )
        text = [(_below_prefix(tensor), stored_tensor) for tensor, stored_tensor in super()._match(stored)]
        named = {name: self._kind.ours(name) for name in self._vision}
        self.left_out = [name for name in self.left_out if name not in named]
        shapes = {
            ours: self._kind.megatron_shape(ours, self._vision[name].shape)
            for name, ours in named.items()
            if ours is not None
        }
        wrong = [with_indefinite_article(name) for name, ours in named.items() if ours is None]
        wrong += self._kind.mismatches(self.whole_config, shapes)
        if wrong:
            raise UnsupportedCheckpointError(
                "config.json does not describe the tensors of the vision tower",
                found=join_some(wrong, _SHOWN),
                where=str(self.folder),
            )
        vision = self.whole_config["vision_config"]
        return text + [
            (self._kind.tensor(ours, shapes[ours], vision), self._vision[name])
            for name, ours in named.items()
            if ours is not None
        ]

    @property
    def _kind(self) -> VisionTower:
        return VISION_TOWERS[self.whole]

    @override
    def _run_config(self) -> str:
        return run_config(self.family, complete(self.job.arguments()), self._kind.provider_fields(self.whole_config))

    @override
    def _extra_states(self) -> Mapping[str, Any]:
        text = [name.removeprefix(PREFIX) for name in self._weights.names() if name.startswith(PREFIX)]
        of_engine = self.model_arguments.transformer_impl == TRANSFORMER_ENGINE
        states = {f"{PREFIX}{name}": state for name, state in fresh_extra_states(text, of_engine).items()}
        tower = self._kind.states_of([name for name in self._weights.names() if not name.startswith(PREFIX)])
        return {**states, **{f"{module}.{EXTRA_STATE}": fresh(engine) for module, engine in tower.items()}}

    @override
    def _notices(self, view: CheckpointView) -> list[str]:
        notice = f"of {self.whole}, text and images, for Megatron-Bridge: pretrain_gpt.py has no such model"
        return [notice, *self.with_uncommon_dtype()]


class UnmappedVisionLanguageCheckpoint(HuggingFaceCheckpoint):
    """A folder read with its vision part, under Hugging Face's names, to compare it with another folder."""

    @override
    def _match(self, stored: Mapping[str, StoredTensor]) -> list[tuple[HuggingFaceTensor, StoredTensor]]:
        text = super()._match(stored)
        tower = VISION_TOWERS.get(self.whole)
        self.left_out = [name for name in self.left_out if name not in self._vision]
        return text + [
            (_as_it_is(tower.published_name(name) if tower else name, tensor.shape), tensor)
            for name, tensor in self._vision.items()
        ]


def with_vision_tower(checkpoint: CheckpointView) -> CheckpointView:
    """Reopen a Hugging Face folder, opened as text only, with its vision part.

    This applies if Megatron-Bridge has such a model.
    """
    reader = checkpoint.format.reader
    if not isinstance(reader, HuggingFaceCheckpoint) or reader.whole not in VISION_TOWERS:
        return checkpoint
    return reader.read_again(VisionLanguageCheckpoint).view


def compared_whole(opened: Sequence[CheckpointView]) -> list[CheckpointView]:
    """Reopen two folders of vision-language models in full to compare them.

    Anything else is returned unchanged.
    """
    readers = [checkpoint.format.reader for checkpoint in opened]
    folders = [reader for reader in readers if isinstance(reader, HuggingFaceCheckpoint) and reader.whole]
    if len(folders) < len(opened):
        return [*opened]
    return [reader.read_again(UnmappedVisionLanguageCheckpoint).view for reader in folders]


def as_text_model(checkpoint: CheckpointView) -> CheckpointView:
    """Return a view of Megatron-Bridge's vision-language model with the names of a text model.

    Returns:
        The checkpoint itself if it contains another model.
    """
    names = checkpoint.names(WEIGHT)
    kind = vision_model_type(names)
    if kind is None:
        return checkpoint
    view = rename_tensors(checkpoint, {name: name.removeprefix(PREFIX) for name in names})
    text = frozenset(name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))
    # In a text, the positions on all three axes are equal.
    arguments = lazy(lambda: view.job.arguments().replace(position_embedding_type="rope"))
    return replace(
        view,
        job=replace(view.job, arguments=arguments),
        composition=replace(view.composition, whole_model=WholeModel(kind, text)),
    )


def vision_tensors(checkpoint: CheckpointView, config: Mapping[str, Any]) -> list[HuggingFaceTensor]:
    """Return the tensors of the vision part in a view from `as_text_model`; empty for any other.

    Args:
        checkpoint: the checkpoint.
        config: the `config.json` of a Hugging Face folder, or empty.

    Raises:
        UnsupportedCheckpointError: the `config.json` has another model type, or describes another model.
    """
    whole = checkpoint.composition.whole_model
    if whole is None:
        return []
    vision = config.get("vision_config")
    if config.get("model_type") != whole.kind or not isinstance(vision, Mapping):
        raise UnsupportedCheckpointError(
            "the vision tower is described only in config.json, which is missing",
            found=str(config.get("model_type", "none in the checkpoint's folder")),
            expected=f"model_type {whole.kind}",
            where=str(checkpoint.files.folder),
            hint=_HINT,
        )
    tower = VISION_TOWERS[whole.kind]
    names = checkpoint.names(WEIGHT)
    shapes = {name: named_tensor(checkpoint, WEIGHT, name).shape for name in names if name not in whole.text}
    _refuse([*tower.mismatches(config, shapes), *_unlike(vision, checkpoint)], checkpoint)
    return [tower.tensor(name, shape, vision) for name, shape in shapes.items()]


def _unlike(vision: Mapping[str, Any], checkpoint: CheckpointView) -> list[str]:
    """Return where Megatron-Bridge's own file contradicts the vision configuration."""
    recorded = ((run_config_of(checkpoint.files.folder) or {}).get("model") or {}).get("vision_config")
    trained = recorded if isinstance(recorded, Mapping) else {}
    return [
        f"{key} is {vision[key]}, not {value}, in vision_config"
        for key, value in trained.items()
        if key in vision and key not in _OF_TRAINING and is_plain(value) and vision[key] != value
    ]


def text_tensors(checkpoint: CheckpointView, family: Family, arguments: ModelArguments) -> list[HuggingFaceTensor]:
    """Return the tensors of a text model to write.

    Those of a vision-language model are in the layout of released folders.

    Raises:
        UnsupportedCheckpointError: released folders store experts transposed, which shapes do not show.
    """
    if checkpoint.composition.whole_model is None:
        return family.tensors(arguments)
    tower = VISION_TOWERS[checkpoint.composition.whole_model.kind]
    tensors = family.tensors(arguments, _STACKED if tower.experts else None)
    written = map(turned_stack, tensors) if tower.experts else tensors
    return [replace(tensor, name=tower.folder_name(tensor.name)) for tensor in written]


def checked_whole(
    config: Mapping[str, Any], family: Family, arguments: ModelArguments, checkpoint: CheckpointView
) -> dict[str, Any]:
    """Check and return the `config.json` of a vision-language model.

    No arguments describe its vision part.

    Args:
        config: the `config.json` of a Hugging Face folder.
        family: the family of the text.
        arguments: the arguments of the text.
        checkpoint: a view from `as_text_model`.

    Raises:
        UnsupportedCheckpointError: the `config.json` describes another model.
    """
    text = text_config(config) or {}
    neutral = neutral_keys(text, str(config.get("model_type")), config)
    described = family.config(family.arguments(text, neutral))
    trained = family.config(arguments)
    wrong = [
        f"{key} is {described.get(key)!r}, not {value!r}"
        for key, value in trained.items()
        if key not in _OF_TRAINING and described.get(key) != value
    ]
    axes = checkpoint.job.arguments().raw.get("mrope_section")
    if axes is not None and list(axes) != list(sections_of(config) or ()):
        wrong.append(f"mrope_section is {sections_of(config)}, not {axes}")
    _refuse(wrong, checkpoint)
    return {key: value for key, value in config.items() if key != "dtype"}


def _as_it_is(name: str, shape: tuple[int, ...]) -> HuggingFaceTensor:
    return HuggingFaceTensor(name, shape, (Region.whole(name, shape),))


def _below_prefix(tensor: HuggingFaceTensor) -> HuggingFaceTensor:
    return replace(tensor, regions=tuple(replace(region, name=f"{PREFIX}{region.name}") for region in tensor.regions))


def _refuse(wrong: Sequence[str], checkpoint: CheckpointView) -> None:
    if wrong:
        raise UnsupportedCheckpointError(
            "config.json describes another model than the trained one",
            found="; ".join(wrong[:_SHOWN]),
            where=str(checkpoint.files.folder),
            hint=_HINT,
        )
