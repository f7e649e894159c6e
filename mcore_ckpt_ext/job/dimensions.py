"""The dimensions of a parallel layout, a row each: names, labels, and arguments of Megatron.

A new dimension is a row here, an attribute of `ParallelLayout`, its argument (`arguments/run.py`), and where it changes
what a rank holds (`layout/rank_grid.py`) or which layouts Megatron accepts (`layout_choice/rules.py`).
"""

from __future__ import annotations

from typing import NamedTuple


class Dimension(NamedTuple):
    """A row of the table.

    Attributes:
        name: the attribute of `ParallelLayout`, and the name in sidecars and JSON.
        label: the name in messages; "" for the number of ranks, which no layout displays.
        argument: Megatron's argument.
        is_of_model: whether it divides the model, so that a user can choose it (`--pin tp=8`, `--rehearse`); else it
            follows from the number of ranks.
        is_always_shown: whether a layout shows it even if its size is 1.
        default: the dimension whose size it has if it is not given; None for 1.
        is_of_experts: whether a model without experts does not have it.
    """

    name: str
    label: str
    argument: str
    is_of_model: bool = True
    is_always_shown: bool = False
    default: str | None = None
    is_of_experts: bool = False


DIMENSIONS = (
    Dimension("tensor", "TP", "tensor_model_parallel_size", is_always_shown=True),
    Dimension("pipeline", "PP", "pipeline_model_parallel_size", is_always_shown=True),
    Dimension("virtual_pipeline", "VPP", "virtual_pipeline_model_parallel_size"),
    Dimension("expert", "EP", "expert_model_parallel_size", is_of_experts=True),
    Dimension("expert_tensor", "ETP", "expert_tensor_parallel_size", default="tensor", is_of_experts=True),
    Dimension("context", "CP", "context_parallel_size"),
    Dimension("data", "DP", "data_parallel_size", is_of_model=False, is_always_shown=True),
    Dimension("world", "", "world_size", is_of_model=False),
)
OF_MODEL = tuple(dimension for dimension in DIMENSIONS if dimension.is_of_model)
SIZE_ARGUMENTS = {dimension.name: dimension.argument for dimension in DIMENSIONS}
"""Megatron's argument for each dimension, by name."""
LABELS = {dimension.name: dimension.label for dimension in DIMENSIONS if dimension.label}
"""The label of each dimension that is displayed, by name."""
PINS = {dimension.label.lower(): dimension.name for dimension in OF_MODEL}
"""The dimensions that a user can choose, and their names in `ParallelLayout`."""
MODEL_SIZE_ARGUMENTS = tuple(dimension.argument for dimension in OF_MODEL)
SPLIT_ARGUMENTS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""The arguments that divide the decoder layers among pipeline stages; they apply to one number of stages only."""
VIRTUAL_STAGE_ARGUMENTS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
"""The arguments that state virtual stages in another way than by their number."""


def with_defaults(sizes: dict[str, int]) -> dict[str, int]:
    """Return the size of each dimension that a user can choose; if not given, Megatron's default."""
    defaults = {dimension.name: sizes.get(dimension.default or "", 1) for dimension in OF_MODEL}
    return defaults | sizes


def format_sizes(sizes: dict[str, int]) -> str:
    """Return sizes as messages show them: those above 1, and those that are always shown.

    Args:
        sizes: the sizes by name; a dimension of unknown size is absent.
    """
    shown = [dimension for dimension in DIMENSIONS if dimension.label and _is_shown(dimension, sizes)]
    return " x ".join(f"{dimension.label}{sizes[dimension.name]}" for dimension in shown)


def _is_shown(dimension: Dimension, sizes: dict[str, int]) -> bool:
    if dimension.name not in sizes:
        return False
    size = sizes[dimension.name]
    if dimension.default is not None:
        return size != sizes.get(dimension.default, 1)
    return size > 1 or dimension.is_always_shown
