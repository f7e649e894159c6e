"""The rows of each part of a parameter that ranks hold as one, and that model space splits.

Sources: `MambaMixer` (megatron/core/ssm/mamba_mixer.py, core_v0.9.0 to 0.19.2) and `GatedDeltaNet`
(ssm/gated_delta_net.py, core_v0.16.0 to 0.18; ssm/gated_delta_net/common.py, 0.19.2). Each part is sharded between
tensor-parallel ranks separately; a rank's rows of all parts are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, join_some, quantity
from mcore_ckpt_ext.model_space.names import is_part, joined_name, part_names, split_parameters


class Arguments(Protocol):
    """The arguments of a job."""

    def value(self, name: str) -> Any:
        """Return one argument."""


def rows_of_net(arguments: Arguments) -> dict[str, int]:
    """Return the rows of each part of a gated delta net's projection, over all tensor-parallel ranks."""
    key_heads = arguments.value("linear_num_key_heads")
    value_heads = arguments.value("linear_num_value_heads")
    keys = key_heads * arguments.value("linear_key_head_dim")
    values = value_heads * arguments.value("linear_value_head_dim")
    return {"query": keys, "key": keys, "value": values, "z": values, "beta": value_heads, "alpha": value_heads}


def rows_of_mixer(arguments: Arguments) -> dict[str, int]:
    """Return the rows of each part of a Mamba mixer's projection, over all tensor-parallel ranks."""
    heads = arguments.value("mamba_num_heads")
    width = arguments.value("mamba_head_dim")
    heads = heads or 2 * arguments.value("hidden_size") // width
    states = arguments.value("mamba_num_groups") * arguments.value("mamba_state_dim")
    return {"z": heads * width, "x": heads * width, "B": states, "C": states, "dt": heads}


def parts_of(name: str, shape: tuple[int, ...], ranks: int, arguments: Arguments) -> Mapping[str, tuple[int, ...]]:
    """Return the names and shapes of the parts of a rank's tensor.

    Args:
        name: model-space name of the unsplit parameter.
        shape: the shape of the rank's tensor.
        ranks: the number of ranks that share it.
        arguments: the arguments of the job that wrote it.

    Returns:
        Its own name and shape if model space does not split it.

    Raises:
        UnsupportedCheckpointError: the sizes of the parts contradict that of the tensor.
    """
    names = part_names(name)
    if names == [name]:
        return {name: shape}
    try:
        rows = rows_of_mixer(arguments) if ".mixer." in name else rows_of_net(arguments)
    except (TypeError, ZeroDivisionError):  # an argument is missing
        rows = {}
    parts = {part: divmod(rows.get(part.rpartition(".")[2], 0), ranks) for part in names}
    if sum(size for size, _ in parts.values()) != shape[0] or any(rest for _, rest in parts.values()):
        raise UnsupportedCheckpointError(
            "a parameter's parts do not match the arguments of its job",
            found=f"{quantity(shape[0], 'row')} on each of {quantity(ranks, 'rank')}",
            expected=", ".join(f"{size} of {part.rpartition('.')[2]}" for part, (size, _) in parts.items()),
            where=name,
            hint="use --to torch_dist, or resume it once under its own layout and save with --ckpt-format torch_dist: "
            "that format records them",
        )
    return {part: (size, *shape[1:]) for part, (size, _) in parts.items()}


def check_recoverable(names: Iterable[str]) -> None:
    """Refuse parameters whose parts cannot be recovered from the whole parameter, as `parts_of` does.

    Args:
        names: the model-space names of all weights.

    Raises:
        UnsupportedCheckpointError: they have other parts than a Mamba mixer or a gated delta net.
    """
    for first, parts in split_parameters(names).items():
        if parts != part_names(whole := joined_name(first)):
            raise UnsupportedCheckpointError(
                "the parts of a parameter cannot be recovered where it is stored as one tensor",
                found=join_some([part.removeprefix(f"{whole}.") for part in parts], 8),
                where=whole,
                hint="use --to torch_dist, which stores each part",
            )


def check_whole(name: str, form: str) -> str:
    """Return the name of a parameter if model space does not split it; `form`: the format, for messages.

    Raises:
        UnsupportedCheckpointError: model space splits it, and the positions of its parts in that format are unknown.
    """
    if is_part(name) or part_names(name) != [name]:
        raise UnsupportedCheckpointError(
            f"the order in which {form} stores the projections and filters of gated delta nets and Mamba "
            "mixers is unknown",
            where=name,
            hint="use --to torch_dist, or save with --ckpt-format torch_dist",
        )
    return name
