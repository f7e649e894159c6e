"""Options for opening the folder of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore_ckpt_ext.job.facts import NOTHING, Facts

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.family import Family
    from mcore_ckpt_ext.formats.view import CheckpointView
    from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
    from mcore_ckpt_ext.storage.dcp_index import FolderIndex


@dataclass(frozen=True)
class OpenOptions:
    """Options for opening a folder.

    Attributes:
        order_sources: parameter orders to try when the packing of the gradient buffers is recovered.
        family: the family of a Hugging Face folder if its `config.json` does not name a supported one.
        transformer_impl: the layer spec under whose names a Hugging Face folder is read.
        facts: properties of the job that wrote a checkpoint without Megatron's arguments.
        model: the model of the adapters, if the folder contains only adapters.
        index: the folder's index; None if it has not been used yet.
    """

    order_sources: Sequence[ParameterOrder] = ()
    family: Family | None = None
    transformer_impl: str = "transformer_engine"
    facts: Facts = NOTHING
    model: CheckpointView | None = None
    index: FolderIndex | None = None


DEFAULT_OPTIONS = OpenOptions()
