"""The order in which the job that will read a checkpoint registers its parameters, as far as the source shows it."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import FILTERS_ARE_FIRST
from mcore_ckpt_ext.layout.parameter_order import ObservedOrder, ParameterOrder, filters_first, known_orders
from mcore_ckpt_ext.model_space.names import Layer, of_experts, split_layer


def order_for(
    checkpoint: CheckpointView, arguments: JobArguments, has_expert_optimizer: bool, version: tuple[int, int]
) -> ParameterOrder:
    """The order to write gradient buffers in.

    The layer spec that the arguments name decides, unless the source shows that its model is built otherwise.

    Args:
        checkpoint: the source.
        arguments: Megatron's arguments of the job that will read.
        has_expert_optimizer: whether experts have buffers of their own there.
        version: of its Megatron.

    Raises:
        UnsupportedCheckpointError: the source follows no known order, and its own does not show where experts stand, or
            what other versions register elsewhere.
    """
    registered = _registered(checkpoint)
    for order in known_orders(arguments):
        if all(_agrees(order, names) for names in registered):
            return order.of_version(version)
    if any(filters_first(names) not in (None, FILTERS_ARE_FIRST.is_of(version)) for names in registered):
        raise UnsupportedCheckpointError(
            "the model registers its parameters in an unknown order, and that version orders those of Mamba "
            "mixers differently",
            where=str(checkpoint.folder),
            hint="use --to torch_dist, which does not depend on the order",
        )
    if checkpoint.has_expert_optimizer == has_expert_optimizer or not any(
        of_experts(name) for names in registered for name in names
    ):
        return ObservedOrder("the source's own model", registered)
    raise UnsupportedCheckpointError(
        "the model registers its parameters in an unknown order, so the place of its experts in the "
        "other layout is unknown",
        where=str(checkpoint.folder),
        hint="keep the expert-parallel size, or use --to torch_dist, which does not depend on the order",
    )


def _registered(checkpoint: CheckpointView) -> list[list[str]]:
    """Names in registration order, a list for each buffer whose packing is proven; the buffers hold them in reverse."""
    # Under another layer spec parameters are registered in another order.
    shown = checkpoint.optimizer_format and checkpoint.trained.shows_registration
    buffers = checkpoint.optimizer.buffers if shown else ()
    found = []
    for packing in (part.packing_of(group).packing for part in buffers for group in part.groups.values()):
        for buffer in sorted({key.buffer for key in packing}):
            placed = [
                (key.bucket, placement.start, placement.name)
                for key, placements in packing.items()
                if key.buffer == buffer
                for placement in placements
            ]
            found.append([name for *_, name in sorted(placed, reverse=True)])
    return found


def _agrees(order: ParameterOrder, names: Sequence[str]) -> bool:
    """Whether an order arranges every layer of a buffer as it was found."""
    layers: dict[Layer, list[str]] = {}
    for name in names:
        layer, suffix = split_layer(name)
        if layer is not None:
            layers.setdefault(layer, []).append(suffix)
    return all(order.arrange(layer, suffixes) == suffixes for layer, suffixes in layers.items())
