"""Rules of model families, which map rows of Megatron's parameters to Hugging Face tensors."""

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
"""Values for the fields in a rule's names."""

Condition = Callable[[ModelArguments, int], bool]
"""Returns whether a rule applies, given the arguments and a decoder layer (0 outside of layers)."""

ShapeOf = Callable[[str, ModelArguments], tuple[int, ...]]
"""Returns the shape of a Megatron parameter, given the arguments."""

Piece = tuple[str, int, int]
"""A piece of a parameter that is stored in several: suffix of its name, first row, number of rows."""


def always(arguments: ModelArguments, layer: int) -> bool:
    """Return True: the rule applies to every model and layer."""
    return True


def dense(arguments: ModelArguments, layer: int) -> bool:
    """Return whether a layer has no experts."""
    return not has_experts(arguments, layer)


def set_in(argument: str) -> Condition:
    """Return a condition for models in which an argument is set."""
    return lambda arguments, layer: bool(arguments.value(argument))


with_experts: Condition = has_experts
"""The rule applies to layers with experts."""
untied = set_in("untie_embeddings_and_output_weights")
"""The rule applies if the output layer has its own weight."""


@dataclass(frozen=True)
class Rule:
    """The mapping from rows of a Megatron parameter to a Hugging Face tensor.

    Attributes:
        hugging_face: name of the tensor; `{layer}` and `{expert}` stand for every layer and expert. For an MTP layer,
            `{next}` is its number after the decoder's layers, and `{step}` its number in Megatron.
        megatron: model-space name of the parameter in the Transformer Engine spec. If only this name has `{expert}`,
            the tensor is a stack of all experts.
        rows: the rows of the parameter; by default all.
        where: condition for models and layers.
        keeps_dtype: `--dtype` does not change the dtype.
        pieces: for a parameter that is stored in several, the pieces of the tensor; `rows` is then ignored.
        swapped: the two halves of each row are exchanged.
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
    """A Hugging Face tensor: its name, its shape, and the consecutive regions of which it consists.

    Attributes:
        transposed: the regions form a matrix whose transpose is the tensor.
        interleaved: number of equally sized parts of the parameter whose rows alternate in the tensor.
        shift: number added to Megatron's values.
        keeps_dtype: `--dtype` does not change the dtype.
    """

    name: str
    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    transposed: bool = False
    interleaved: int = 1
    shift: float = 0.0
    keeps_dtype: bool = False


def rule_places(rule: Rule, arguments: ModelArguments) -> Iterator[tuple[int, Places]]:
    """Yield for each layer of a rule the layer number for its condition, and the values for its names."""
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
    """Yield the tensors of a rule in one layer: one, one for each expert, or a stack of all experts."""
    experts = range(arguments.num_experts or 0) if "{expert}" in rule.megatron else range(1)
    parts = [_rule_tensor(rule, places, arguments, shape, expert) for expert in experts]
    if "{expert}" in rule.hugging_face or "{expert}" not in rule.megatron:
        yield from parts
    else:
        regions = tuple(region for part in parts for region in part.regions)
        yield replace(parts[0], shape=(len(parts), *parts[0].shape), regions=regions)


def _rule_tensor(
    rule: Rule, places: Places, arguments: ModelArguments, shape: ShapeOf, expert: int
) -> HuggingFaceTensor:
    """Return the tensor of a rule for one layer and one expert."""
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
        (*inner, rows) if turned else (rows, *inner),
        regions,
        turned,
        rule.rows.interleaved,
        rule.rows.shift,
        rule.keeps_dtype,
    )


def _halves_swapped(region: Region) -> Iterator[Region]:
    """Return the regions of a matrix with the halves of each row exchanged."""
    rows = range(region.offsets[0], region.offsets[0] + region.sizes[0])
    half = region.sizes[1] // 2
    return (Region(region.name, (row, start), (1, half)) for row in rows for start in (half, 0))


def name_pattern(template: str) -> re.Pattern[str]:
    """Return a pattern that matches all names of a rule."""
    return re.compile(re.sub(r"\\\{(layer|expert|next|step)\\\}", r"\\d+", re.escape(template)))


def names_matching(names: Collection[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match one of the patterns."""
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def parameter_shapes(tensors: Sequence[HuggingFaceTensor]) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of all Megatron parameters of which the tensors consist.

    Raises:
        UnsupportedCheckpointError: rows of a parameter are missing, or used twice.
    """
    spans: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    inner: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        for region in tensor.regions:
            name = region.name
            behind = region.offsets[1:]
            spans.setdefault((name, behind), []).append((region.offsets[0], region.sizes[0]))
            ends = tuple(offset + size for offset, size in zip(behind, region.sizes[1:], strict=True))
            inner[name] = max(ends, inner.get(name, ends))
    shapes: dict[str, tuple[int, ...]] = {}
    for (name, _), ranges in spans.items():
        end = 0
        for start, count in sorted(ranges):
            if start != end:
                raise UnsupportedCheckpointError(
                    "the family's rules omit or repeat rows of a parameter",
                    found=f"row {start} after row {end - 1}",
                    where=name,
                )
            end += count
        shapes[name] = (end, *inner[name])
    return shapes
