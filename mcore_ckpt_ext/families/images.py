"""What sees images in a model, as Megatron-Bridge holds it beside the model's text.

Sources: models/qwen_vl/qwen25_vl_bridge.py, qwen25_vl_provider.py and modeling_qwen25_vl.py of Megatron-Bridge 0.6.2
and its commit 067f987d: the class of transformers, whole on every tensor-parallel rank of the first pipeline stage.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.family import HuggingFaceTensor
from mcore_ckpt_ext.families.values import check_plain
from mcore_ckpt_ext.model_space.anatomy import LANGUAGE_MODEL
from mcore_ckpt_ext.model_space.slices import Region

PREFIX = f"{LANGUAGE_MODEL}."
"""What stands before the names of the text there."""
_ROPE = ("rope_parameters", "rope_scaling")
_SECTIONS = "mrope_section"


@dataclass(frozen=True)
class Images:
    """How a kind of models is held.

    Attributes:
        rules: names in Hugging Face's folders and in Megatron-Bridge; `**` stands for any rest.
        provider: the class of the whole, below `megatron.bridge.models`.
        config_class: of transformers, of the part that sees.
        fields: keys of `config.json` that the provider has, too.
        sizes: keys of `vision_config`, and what shows them: the count of what a pattern matches, or the rows of a
            tensor that it does.
    """

    rules: Sequence[tuple[str, str]]
    provider: str
    config_class: str
    fields: Sequence[str]
    sizes: Mapping[str, tuple[str, str]]

    def ours(self, name: str) -> str | None:
        """The name in Megatron of a tensor of a Hugging Face folder; None where it has no place."""
        bare = name.removeprefix("model.")  # of some folders of transformers 4.52 and later
        return next((found for theirs, ours in self.rules if (found := _translated(bare, theirs, ours))), None)

    def theirs(self, name: str) -> str | None:
        """The way back."""
        return next((found for theirs, ours in self.rules if (found := _translated(name, ours, theirs))), None)

    def provider_fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What the section `model` of `run_config.yaml` says of the whole.

        Raises:
            UnsupportedCheckpointError: the `config.json` lacks something, or gives a value of a kind that none has.
        """
        vision = config.get("vision_config")
        section = sections_of(config)
        if not isinstance(vision, Mapping) or section is None:
            lacking = "vision_config" if section else f"{_SECTIONS} in rope_parameters or rope_scaling"
            raise UnsupportedCheckpointError("config.json lacks a key", expected=lacking, where="config.json")
        plain = {key: value for key, value in vision.items() if key not in _ROPE and not isinstance(value, Mapping)}
        found = {key: config[key] for key in self.fields if key in config}
        check_plain({**plain, **found, _SECTIONS: section})
        return {
            **found, "_target_": f"megatron.bridge.models.{self.provider}", "position_embedding_type": "mrope",
            _SECTIONS: section, "scatter_embedding_sequence_parallel": False,
            "vision_config": {**plain, "_target_": f"transformers.models.{self.config_class}"},
        }  # fmt: skip

    def misfits(self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Why a `config.json` does not describe what sees, by the shapes of its tensors in Megatron."""
        vision, found = config.get("vision_config") or {}, []
        for key, (what, pattern) in self.sizes.items():
            matches = {match[0]: shape for name, shape in shapes.items() if (match := re.match(pattern, name))}
            size = len(matches) if what == "count" else next((shape[0] for shape in matches.values()), None)
            if vision.get(key) != size:
                found.append(f"{key} is {vision.get(key)} in vision_config, and {size} by the tensors")
        return found


_BLOCK = r"visual\.blocks\.\d+\."
IMAGES: Mapping[str, Images] = {
    "qwen2_5_vl": Images(
        rules=(("visual.**", "visual.**"),),
        provider="qwen_vl.qwen25_vl_provider.Qwen25VLModelProvider",
        config_class="qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig",
        fields=("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"),
        sizes={
            "depth": ("count", _BLOCK), "hidden_size": ("rows", r"visual\.patch_embed\.proj\.weight$"),
            "intermediate_size": ("rows", _BLOCK + r"mlp\.gate_proj\.weight$"),
            "out_hidden_size": ("rows", r"visual\.merger\.mlp\.2\.weight$"),
        },
    ),
}  # fmt: skip
"""By the `model_type` of the whole."""


def sections_of(config: Mapping[str, Any]) -> Any:
    """How many of a head's frequencies belong to each axis of a position; None where nothing says so."""
    inside = config.get("text_config")
    for part in (inside if isinstance(inside, Mapping) else {}, config):
        for key in _ROPE:
            if isinstance(part.get(key), Mapping) and part[key].get(_SECTIONS) is not None:
                return part[key][_SECTIONS]
    return None


def kind_of(names: Collection[str]) -> str | None:
    """The `model_type` of a checkpoint of Megatron-Bridge with these names; None where it is no such whole."""
    of_images = [name for name in names if not name.startswith(PREFIX)]
    if not of_images or len(of_images) == len(names):
        return None
    return next((kind for kind, images in IMAGES.items() if all(map(images.theirs, of_images))), None)


def whole_tensor(theirs: str, ours: str, shape: tuple[int, ...]) -> HuggingFaceTensor:
    """A tensor that both sides hold as it is."""
    return HuggingFaceTensor(theirs, shape, (Region.whole(ours, shape),))


def _translated(name: str, one: str, other: str) -> str | None:
    """A name under the other template of a rule; None where the first is not its own."""
    beginning, _, _ = one.partition("**")
    if "**" not in one:
        return other if name == one else None
    return other.partition("**")[0] + name.removeprefix(beginning) if name.startswith(beginning) else None
