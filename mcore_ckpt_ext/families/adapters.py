"""Low-rank adapters: the mapping between PEFT's tensors and rows of Megatron-Bridge's adapters.

The adapter of a fused Megatron linear layer serves all Hugging Face linear layers in it: their `lora_B` are rows of its
`lora_B`, split like the weight, and they share its `lora_A`. Sources: peft/lora.py, dora_layers.py, canonical_lora.py
and utils.py (`ParallelLinearAdapter`) of megatron-bridge 0.3.1; peft 0.21.2 (utils/save_and_load.py) for names in PEFT.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, join_some
from mcore_ckpt_ext.families.family import HuggingFaceTensor
from mcore_ckpt_ext.model_space.adapters import IN, MAGNITUDE, MARK, OUT, PARTS
from mcore_ckpt_ext.model_space.names import is_of_experts, module_and_leaf
from mcore_ckpt_ext.model_space.slices import Region

MAGNITUDES = "lora_magnitude_vector"
PREFIX = "base_model.model."
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Adapted:
    """A Hugging Face linear layer, and its adapter with PEFT's names.

    Attributes:
        base: weight of the linear layer.
        into: `lora_A`, (rank, input features).
        out: `lora_B`, (output features, rank).
        magnitudes: magnitude vector of DoRA, (output features,).
    """

    base: HuggingFaceTensor
    into: HuggingFaceTensor
    out: HuggingFaceTensor
    magnitudes: HuggingFaceTensor | None = None

    @property
    def tensors(self) -> list[HuggingFaceTensor]:
        """The tensors of the adapter."""
        return [self.into, self.out, *([self.magnitudes] if self.magnitudes else [])]

    @property
    def rank(self) -> int:
        """The rank of the adapter."""
        return self.into.shape[0]

    @property
    def module(self) -> str:
        """The name of the linear layer."""
        return self.base.name.removesuffix(".weight")


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model.

    Attributes:
        linears: the linear layers that have an adapter.
        modules: names of all linear layers.
    """

    linears: Sequence[Adapted]
    modules: frozenset[str]

    @property
    def tensors(self) -> list[HuggingFaceTensor]:
        """The tensors of a PEFT folder."""
        return [tensor for linear in self.linears for tensor in linear.tensors]

    @property
    def rank(self) -> int:
        """The common rank of all adapters.

        Raises:
            UnsupportedCheckpointError: the adapters have different ranks.
        """
        ranks = {linear.rank for linear in self.linears}
        if len(ranks) != 1:
            raise UnsupportedCheckpointError(
                "the adapters have different ranks",
                found=join_some(sorted(map(str, ranks))),
                hint="merge them into their model, where each keeps its rank: --merge FOLDER --to hf",
            )
        return ranks.pop()

    @property
    def targets(self) -> set[str]:
        """The value of PEFT's `target_modules`."""
        return shortest({linear.module for linear in self.linears}, self.modules)

    @property
    def has_magnitudes(self) -> bool:
        """True if the adapters are DoRA's."""
        return any(linear.magnitudes for linear in self.linears)


def adapters_of(
    base: Sequence[HuggingFaceTensor], shapes: Shapes, tensor_ranks: int | None, *, by_rank: bool = False
) -> Adapters:
    """Return the adapters of a model.

    Args:
        base: all tensors of the model, without adapters.
        shapes: shapes of the adapters' tensors, by model-space name.
        tensor_ranks: tensor-parallel size of the job that wrote them; None if unknown.
        by_rank: the rows of `lora_B` of a gated `linear_fc1` are stored rank by rank, as magnitudes are.

    Raises:
        UnsupportedCheckpointError: the linear layer of an adapter is unknown.
    """
    linears = linears_of(base)
    adapters: list[Adapted] = []
    for linear in dict.fromkeys(name.partition(MARK)[0] for name in shapes):
        ours = linears.get(linear, ())
        if not ours:
            raise _refusal_without_place([name for name in shapes if name.startswith(linear)])
        for number, tensor in enumerate(ours):
            adapters += _Linear(linear, number, len(ours), shapes, tensor_ranks, by_rank).adapters_of(tensor)
    used = {region.name for adapter in adapters for tensor in adapter.tensors for region in tensor.regions}
    if used != shapes.keys():
        raise _refusal_without_place(sorted(shapes.keys() - used))
    return Adapters(adapters, frozenset(tensor.name.removesuffix(".weight") for tensor in base))


def linears_of(base: Sequence[HuggingFaceTensor]) -> dict[str, list[HuggingFaceTensor]]:
    """Return the Hugging Face weights in each Megatron linear layer, in the order of its rows.

    Linear layers for which PEFT has no adapters are left out.
    """
    linears: dict[str, list[HuggingFaceTensor]] = {}
    for tensor in sorted(base, key=lambda tensor: tensor.regions[0].offsets[0]):
        name = tensor.regions[0].name
        module, leaf = module_and_leaf(name)
        # transformers does not implement routers as linear layers, and Megatron-Bridge has several kinds of adapters
        # for experts.
        if module.startswith("linear_") and leaf == "weight" and not is_of_experts(name):
            linears.setdefault(name.removesuffix(".weight"), []).append(tensor)
    return {name: ours for name, ours in linears.items() if all(map(_is_plain, ours))}


def _is_plain(tensor: HuggingFaceTensor) -> bool:
    """Return whether a tensor is the matrix of a linear layer, row by row."""
    is_whole = not any(any(region.offsets[1:]) for region in tensor.regions)
    return not tensor.transposed and tensor.interleaved == 1 and len(tensor.shape) == 2 and is_whole


def align_rows(*columns: Sequence[Region]) -> Iterator[tuple[list[int], int]]:
    """Yield ranges of corresponding rows in several lists of regions.

    Yields:
        The first row of a range in each list, and the number of rows.
    """
    ends = [list(accumulate(region.sizes[0] for region in regions)) for regions in columns]
    at = [0] * len(columns)
    for start, stop in pairwise(sorted({0, *chain.from_iterable(ends)})):
        at = [place + (column_ends[place] <= start) for place, column_ends in zip(at, ends, strict=True)]
        regions_with_ends = [
            (regions[place], column_ends[place]) for regions, place, column_ends in zip(columns, at, ends, strict=True)
        ]
        yield [region.offsets[0] + region.sizes[0] - (end - start) for region, end in regions_with_ends], stop - start


def shortest(adapted: set[str], modules: Collection[str]) -> set[str]:
    """Return `target_modules`: last parts of names if these select exactly the adapted layers.

    Returns:
        Full names if last parts of names would select other layers, too.
    """
    last = {name.rpartition(".")[2] for name in adapted}
    all_of_them = {name for name in modules if name.rpartition(".")[2] in last}
    return last if all_of_them == adapted else adapted


def _refusal_without_place(names: Sequence[str]) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        "these adapters have no known form in PEFT",
        found=join_some(list(names), 4),
        expected="those of linears of attention and dense MLPs, of Megatron-Bridge's LoRA, DoRA or CanonicalLoRA",
        hint="use --to canonical, which keeps them unchanged",
    )


@dataclass(frozen=True)
class _Linear:
    """The adapter of Megatron's linear layer `name`, for Hugging Face's layer `part` of `parts`."""

    name: str
    part: int
    parts: int
    shapes: Shapes
    tensor_ranks: int | None
    by_rank: bool

    def adapters_of(self, base: HuggingFaceTensor) -> Iterator[Adapted]:
        """Yield the adapter in PEFT of the linear layer with weight `base`, if it has one."""
        module = PREFIX + base.name.removesuffix(".weight")
        spans = [(region.offsets[0], region.sizes[0]) for region in base.regions]
        part_names = PARTS.get(self.name.rpartition(".")[2], ())
        apart = f"{self.name}{MARK}{part_names[self.part]}." if len(part_names) == self.parts else ""
        is_apart = any(name.startswith(f"{self.name}{MARK}{part}.") for part in part_names for name in self.shapes)
        before = apart if is_apart and apart else f"{self.name}{MARK}"
        if before + IN not in self.shapes or before + OUT not in self.shapes:
            return
        rows, rank = self.shapes[before + OUT]
        if is_apart:
            spans = [(0, rows)]
        if is_apart and self.name.endswith("linear_fc1"):
            spans = list(self._as_halves(rows))
        elif self.by_rank and self.name.endswith("linear_fc1") and self.parts == 2:
            spans = list(self._rows_of_each_rank(rows))
        elif self.name.endswith("linear_fc1") and self.parts == 1 and self._ranks() > 1:
            raise UnsupportedCheckpointError(
                "releases of Megatron-Bridge store the rows of this adapter in different orders",
                where=self.name,
                found=f"a linear without a gate, under TP{self._ranks()}",
                expected="TP1",
                hint="save it once with --tensor-model-parallel-size 1",
            )
        if sum(count for _, count in spans) != base.shape[0] or self.shapes[before + IN] != (rank, base.shape[1]):
            raise UnsupportedCheckpointError(
                "an adapter does not have the shape of its linear",
                found=str((rows, rank)),
                expected=f"that of {base.name}, {base.shape}",
                where=self.name,
            )
        into = HuggingFaceTensor(f"{module}.lora_A.weight", (rank, base.shape[1]), (_whole(before + IN, self.shapes),))
        regions = tuple(Region(before + OUT, (start, 0), (count, rank)) for start, count in spans)
        out = HuggingFaceTensor(f"{module}.lora_B.weight", (base.shape[0], rank), regions)
        if before + MAGNITUDE not in self.shapes:
            yield Adapted(base, into, out)
            return
        if not is_apart and self.name.endswith("linear_fc1") and self.parts == 2:
            spans = list(self._rows_of_each_rank(self.shapes[before + MAGNITUDE][0]))
        regions = tuple(Region(before + MAGNITUDE, (start,), (count,)) for start, count in spans)
        yield Adapted(base, into, out, HuggingFaceTensor(f"{module}.{MAGNITUDES}", (base.shape[0],), regions))

    def _as_halves(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield rows stored as those of a gate and an up projection, although they belong to one of them.

        `ParallelLinearAdapter.sharded_state_dict` treats every adapter of a `linear_fc1` as if it had both: it stores
        the first half of each rank's rows in the first half of the array, and the second half in the second.
        """
        ranks = self._ranks()
        size = rows // (2 * ranks)
        for rank in range(ranks):
            yield from ((rank * size, size), (rows // 2 + rank * size, size)) if ranks > 1 else ()
        if ranks == 1:
            yield 0, rows

    def _rows_of_each_rank(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield the rows of one of two projections if each rank stores the gate's, then the other's.

        `ParallelLinearDoRAAdapter.sharded_state_dict` stores the magnitudes of a `linear_fc1` as those of a single
        matrix.
        """
        ranks = self._ranks()
        size = rows // (2 * ranks)
        yield from (((2 * rank + self.part) * size, size) for rank in range(ranks))

    def _ranks(self) -> int:
        if self.tensor_ranks is None:
            raise UnsupportedCheckpointError(
                "the order of an adapter's rows depends on the tensor parallel size that it was saved under",
                where=self.name,
                hint="pass it: --source-tensor-model-parallel-size N",
            )
        return self.tensor_ranks


def _whole(name: str, shapes: Shapes) -> Region:
    return Region.whole(name, tuple(shapes[name]))
