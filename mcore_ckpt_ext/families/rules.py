"""Rules of model families: of which rows of Megatron's parameters each Hugging Face tensor consists."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.parameter_shapes import spec_name
from mcore_ckpt_ext.families.rows import WHOLE, Rows
from mcore_ckpt_ext.job.model_arguments import ModelArguments, has_experts
from mcore_ckpt_ext.model_space.slices import Region

Places = Mapping[str, int]
"""What stands for the fields of a rule's names."""

Condition = Callable[[ModelArguments, int], bool]
"""Says, for a job's arguments and a decoder layer (0 outside the layers), whether a rule holds there."""

ShapeOf = Callable[[str, ModelArguments], tuple[int, ...]]
"""The shape of one of Megatron's parameters, for a job's arguments."""

Piece = tuple[str, int, int]
"""Of a parameter that is stored in several: the end of its name, the first row, and the number of rows."""


def always(arguments: ModelArguments, layer: int) -> bool:
    """In every model and layer."""
    return True


def dense(arguments: ModelArguments, layer: int) -> bool:
    """In layers without experts."""
    return not has_experts(arguments, layer)


def with_experts(arguments: ModelArguments, layer: int) -> bool:
    """In layers with experts."""
    return has_experts(arguments, layer)


def untied(arguments: ModelArguments, layer: int) -> bool:
    """In models whose output layer is not the word embedding."""
    return bool(arguments.untie_embeddings_and_output_weights)


def set_in(argument: str) -> Condition:
    """In models with this argument."""
    return lambda arguments, layer: bool(arguments.value(argument))


@dataclass(frozen=True)
class Rule:
    """Where a Hugging Face tensor comes from.

    Attributes:
        hugging_face: its name; `{layer}` and `{expert}` stand for every layer and expert. Of an MTP layer,
            `{next}` is its number after the decoder's layers, and Megatron's `{step}` counts them.
        megatron: the parameter's name in model space, as the Transformer Engine spec stores it. With `{expert}` only
            here, the tensor is a stack of all experts.
        rows: which of the parameter's rows; by default all.
        where: in which models and layers.
        keeps_dtype: `--dtype` leaves it as it is.
        pieces: where the parameter is stored in several, what the tensor consists of; `rows` does not count then.
        swapped: each row begins with the second half of Megatron's.
    """

    hugging_face: str
    megatron: str
    rows: Rows = WHOLE
    where: Condition = always
    keeps_dtype: bool = False
    pieces: Callable[[ModelArguments], Sequence[Piece]] | None = None
    swapped: bool = False


@dataclass(frozen=True)
class HuggingFaceTensor:
    """A Hugging Face tensor: its name, its shape, and the regions that it consists of, one after the other.

    `transposed`: the regions of each parameter are rows of one matrix, and the tensor holds the transpose of that
    matrix. `interleaved`: its rows come by turns from so many parts of the parameter, of equal height. `shift`: what
    its numbers are more.
    """

    name: str
    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    transposed: bool = False
    interleaved: int = 1
    shift: float = 0.0
    keeps_dtype: bool = False


def rule_places(rule: Rule, arguments: ModelArguments) -> Iterator[tuple[int, Places]]:
    """Each layer that a rule is about: as its condition knows it, and what its names are filled with."""
    if (
        "{next}" in rule.hugging_face or "{step}" in rule.megatron
    ):  # such a layer is built as the decoder's last one (`get_gpt_mtp_block_spec`)
        layers = arguments.num_layers
        yield from (
            (layers - 1, {"next": layers + step, "step": step}) for step in range(arguments.mtp_num_layers or 0)
        )
    else:
        number = arguments.num_layers if "{layer}" in rule.hugging_face else 1
        yield from ((layer, {"layer": layer}) for layer in range(number))


def rule_tensors(rule: Rule, places: Places, arguments: ModelArguments, shape: ShapeOf) -> Iterator[HuggingFaceTensor]:
    """The tensors that a rule makes in one layer: one, one for each expert, or a stack of all experts."""
    experts = range(arguments.num_experts or 0) if "{expert}" in rule.megatron else range(1)
    parts = [rule_tensor(rule, places, arguments, shape, expert) for expert in experts]
    if "{expert}" in rule.hugging_face or "{expert}" not in rule.megatron:
        yield from parts
    else:
        regions = tuple(region for part in parts for region in part.regions)
        yield replace(parts[0], shape=(len(parts), *parts[0].shape), regions=regions)


def rule_tensor(
    rule: Rule, places: Places, arguments: ModelArguments, shape: ShapeOf, expert: int = 0
) -> HuggingFaceTensor:
    """The tensor that a rule makes in one layer, of one expert."""
    generic = rule.megatron.format(expert=expert, **places)
    if rule.pieces is not None:
        pieces = rule.pieces(arguments)
    else:
        pieces = [("", *span) for span in rule.rows.spans(shape(generic, arguments)[0], arguments)]
    inner = shape(generic + pieces[0][0], arguments)[1:]
    name = spec_name(generic, arguments)
    regions = tuple(Region(name + end, (start, *(0 for _ in inner)), (count, *inner)) for end, start, count in pieces)
    if rule.swapped:
        regions = tuple(half for region in regions for half in _halves_swapped(region))
    rows = sum(count for _, _, count in pieces)
    turned = rule.rows.transposed
    return HuggingFaceTensor(
        rule.hugging_face.format(expert=expert, **places),
        (*inner, rows) if turned else (rows, *inner), regions, turned, rule.rows.interleaved, rule.rows.shift,
        rule.keeps_dtype,
    )  # fmt: skip


def _halves_swapped(region: Region) -> Iterator[Region]:
    """The second half of each row of a matrix, then the first half."""
    rows, half = range(region.offsets[0], region.offsets[0] + region.sizes[0]), region.sizes[1] // 2
    return (Region(region.name, (row, start), (1, half)) for row in rows for start in (half, 0))


def name_pattern(template: str) -> re.Pattern[str]:
    """What matches the names that a rule's name stands for."""
    return re.compile(re.sub(r"\\\{(layer|expert|next|step)\\\}", r"\\d+", re.escape(template)))


def matching(names: Collection[str], patterns: Sequence[str]) -> list[str]:
    """The names that contain one of the patterns."""
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def parameter_shapes(tensors: Sequence[HuggingFaceTensor]) -> Mapping[str, tuple[int, ...]]:
    """Megatron's parameters that the tensors consist of, and their shapes.

    Raises:
        UnsupportedCheckpointError: rows of a parameter are left out, or taken twice.
    """
    spans: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    inner: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        for region in tensor.regions:
            name, behind = region.name, region.offsets[1:]
            spans.setdefault((name, behind), []).append((region.offsets[0], region.sizes[0]))
            ends = tuple(offset + size for offset, size in zip(behind, region.sizes[1:], strict=True))
            inner[name] = max(ends, inner.get(name, ends))
    shapes: dict[str, tuple[int, ...]] = {}
    for (name, _), found in spans.items():
        end = 0
        for start, count in sorted(found):
            if start != end:
                raise UnsupportedCheckpointError(
                    "the family's rules omit or repeat rows of a parameter",
                    found=f"row {start} after row {end - 1}", where=name,
                )  # fmt: skip
            end += count
        shapes[name] = (end, *inner[name])
    return shapes
