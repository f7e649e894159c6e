"""The options for writing a canonical folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_ckpt_ext.formats.target import LayerSpec, Target


@dataclass(frozen=True, kw_only=True)
class Canonical(Target):
    """Write the layout-free tensors as safetensors with one JSON file, for other tools.

    Attributes:
        transformer_impl: the layer spec whose parameter names are written; by default the source's, or Transformer
            Engine's for a Hugging Face folder.

    Example:
        >>> report = convert("run", "canonical", Canonical())
        >>> sorted(path.name for path in report.destination.glob("*.safetensors"))
        ['canonical-00001-of-00001.safetensors']
    """

    name: ClassVar[str] = "canonical"
    for_any_optimizer: ClassVar[bool] = True

    transformer_impl: LayerSpec | None = None
