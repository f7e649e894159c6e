"""The order in which the job that reads a checkpoint registers parameters, from the source."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import FILTERS_ARE_FIRST
from mcore_ckpt_ext.layout.parameter_order import ObservedOrder, ParameterOrder, filters_first, known_orders
from mcore_ckpt_ext.model_space.names import Layer, is_of_experts, split_layer


def order_for(
    checkpoint: CheckpointView, arguments: JobArguments, has_expert_optimizer: bool, version: tuple[int, int]
) -> ParameterOrder:
    """Return the parameter order for writing gradient buffers.

    The order follows from the layer spec in the arguments, unless the source shows another one.

    Args:
        checkpoint: the source.
        arguments: Megatron's arguments of the job that will read it.
        has_expert_optimizer: whether experts have separate buffers in that job.
        version: the version of Megatron of that job.

    Raises:
        UnsupportedCheckpointError: the source's order is unknown, and does not show the position of experts, or of
            parameters that other versions register elsewhere.
    """
    registered = _registration_order(checkpoint)
    for order in known_orders(arguments):
        if all(_agrees(order, names) for names in registered):
            return order.order_of_version(version)
    if any(filters_first(names) not in (None, FILTERS_ARE_FIRST.is_of(version)) for names in registered):
        raise UnsupportedCheckpointError(
            "the model registers its parameters in an unknown order, and that version orders those of Mamba "
            "mixers differently",
            where=str(checkpoint.files.folder),
            hint="use --to torch_dist, which does not depend on the order",
        )
    if checkpoint.optimizer.has_expert_optimizer() == has_expert_optimizer or not any(
        is_of_experts(name) for names in registered for name in names
    ):
        return ObservedOrder("the source's own model", registered)
    raise UnsupportedCheckpointError(
        "the model registers its parameters in an unknown order, so the place of its experts in the "
        "other layout is unknown",
        where=str(checkpoint.files.folder),
        hint="keep the expert-parallel size, or use --to torch_dist, which does not depend on the order",
    )


def _registration_order(checkpoint: CheckpointView) -> list[list[str]]:
    """Return each verified buffer's names in registration order, the reverse of the buffer's own order."""
    # Another layer spec registers parameters in another order.
    shows_order = checkpoint.optimizer.format() and checkpoint.optimizer.shows_registration
    buffers = checkpoint.optimizer.state().buffers if shows_order else ()
    registered = []
    for packing in (part.packing_of(group).packing for part in buffers for group in part.groups.values()):
        for buffer in sorted({key.buffer for key in packing}):
            placed = [
                (key.bucket, placement.start, placement.name)
                for key, placements in packing.items()
                if key.buffer == buffer
                for placement in placements
            ]
            registered.append([name for *_, name in sorted(placed, reverse=True)])
    return registered


def _agrees(order: ParameterOrder, names: Sequence[str]) -> bool:
    """Return whether an order arranges every layer of a buffer as found."""
    layers: dict[Layer, list[str]] = {}
    for name in names:
        layer, suffix = split_layer(name)
        if layer is not None:
            layers.setdefault(layer, []).append(suffix)
    return all(order.order_in_layer(layer, suffixes) == suffixes for layer, suffixes in layers.items())
