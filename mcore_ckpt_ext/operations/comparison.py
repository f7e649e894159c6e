"""Compares two checkpoints of any formats and layouts in model space, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod

from mcore_ckpt_ext.communicator import ONE_PROCESS, Communicator
from mcore_ckpt_ext.errors import (
    ContentError,
    UnsupportedCheckpointError,
    UsageError,
    quantity,
    reraise_as_unreadable,
)
from mcore_ckpt_ext.formats.accounts import Account, account_of
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.unread_state import OTHER, UnreadState
from mcore_ckpt_ext.formats.view import CheckpointView, carried_kinds
from mcore_ckpt_ext.formats.views import is_before_first_step, with_first_moments, with_names_of
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.anatomy import is_in_vocabulary, word_embeddings_in
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT, LogicalTensor
from mcore_ckpt_ext.operations.comparison_result import (
    SCHEMA,
    Comparison,
    KindComparison,
    PaddingRows,
    TensorDifference,
)
from mcore_ckpt_ext.operations.content import index_of
from mcore_ckpt_ext.operations.coverage import check_stored_once, raise_first_contradiction
from mcore_ckpt_ext.operations.difference_map import DifferenceCounts, MapBuilder
from mcore_ckpt_ext.operations.metadata_comparison import MetadataComparison, compare_metadata
from mcore_ckpt_ext.operations.options import ComparisonOptions, Location
from mcore_ckpt_ext.operations.progress import ByteCounter, Progress
from mcore_ckpt_ext.operations.reading import BlockMemory, blocks, strip_shifts, with_cache
from mcore_ckpt_ext.operations.replicas import differing_copies_of, shifted_names
from mcore_ckpt_ext.operations.resumed_settings import settings_compared
from mcore_ckpt_ext.operations.sources import open_both
from mcore_ckpt_ext.operations.workers import Workers, map_shares
from mcore_ckpt_ext.planning.array_location import Extent, QuantizedMatrix, ReorderedMatrix
from mcore_ckpt_ext.transfer import Transfer, read_slice


def compare(
    a: Location,
    b: Location,
    options: ComparisonOptions | None = None,
    *,
    progress: Progress = lambda done, total: None,
    team: Communicator = ONE_PROCESS,
    **changes: object,
) -> Comparison:
    """Compare two checkpoints.

    Equal means bit by bit: two NaNs with the same bits are equal, 0.0 and -0.0 are not.

    Args:
        a: a path, see `open_checkpoint`.
        b: another path.
        options: what is compared.
        progress: called with the bytes compared so far and the bytes to compare.
        team: the processes that share the tensors, each with the same arguments; all return the same.
        **changes: single options by name, instead of or in addition to `options`: `compare(a, b, tensors_only=True)`.

    Raises:
        CheckpointError: a checkpoint cannot be read, or has none of the requested kinds.
        TypeError: there is no option of that name.

    Example:
        >>> report = convert("run", "other", Legacy())
        >>> found = compare("run", "other")
        >>> found.equal, [(kind.kind, kind.compared) for kind in found.kinds]
        (True, [('weight', 27), ('fp32_param', 27), ('exp_avg', 27), ('exp_avg_sq', 27)])
    """
    options = (options or ComparisonOptions()).with_changes(changes)
    with reraise_as_unreadable(f"{a} or {b}"):
        sides = _sides(a, b, options)
        compared = _comparison(sides, options, progress, team)
        settings = settings_compared(sides[0].checkpoint, sides[1].checkpoint)
        if options.tensors_only or options.kinds is not None or not settings:
            return replace(compared, settings=settings)
        equal = all(setting.equal for setting in settings)
        return replace(compared, settings=settings, settings_equal=equal, equal=compared.tensors_equal and equal)


def _comparison(
    sides: tuple[_Side, _Side], options: ComparisonOptions, progress: Progress, team: Communicator
) -> Comparison:
    kinds = options.kinds
    common_kinds = list(dict.fromkeys(kind for side in sides for kind in side.kinds))
    if any(side.checkpoint.format.is_model_folder for side in sides):
        common_kinds = [kind for kind in common_kinds if all(kind in side.kinds for side in sides)]
    if kinds is not None and (unknown := [kind for kind in kinds if kind not in common_kinds]):
        raise UsageError(
            "there is no such kind to compare", found=" and ".join(unknown), expected=" or ".join(common_kinds)
        )
    chosen = [kind for kind in common_kinds if (kind in kinds if kinds is not None else _counts(kind, sides))]
    for side in sides:
        held = [kind for kind in chosen if kind in side.kinds]
        raise_first_contradiction(side.checkpoint, check_stored_once(side.checkpoint, held))
    of_b = {kind: set(sides[1].names(kind)) for kind in chosen}
    shared = [(kind, name) for kind in chosen for name in sides[0].names(kind) if name in of_b[kind]]
    counter = ByteCounter(sum(sides[0].nbytes(kind, name) for kind, name in shared) // team.size, progress)

    def one(pair: tuple[str, str]) -> TensorDifference:
        try:
            return _compare_tensor(sides, *pair, counter, options.pictures)
        except ContentError as problem:
            return TensorDifference(*pair, ((), ()), ("", ""), problem=str(problem))

    results = Workers(team, options.workers).map(one, shared, lambda pair: sides[0].nbytes(*pair))
    accounts = [_account(side, chosen, kinds) for side in sides]
    of_model = any(side.checkpoint.format.is_model_folder for side in sides)
    counted = kinds or ([*chosen, OTHER] if of_model else ())
    missed = sum(_is_missed(item, counted) for account in accounts for item in account.not_looked_at)
    differing = [_differing_copies(side, chosen, team) for side in sides]
    compared = tuple(_kind_comparison(sides, kind, [r for r in results if r.kind == kind]) for kind in chosen)
    equal = all(comparison.equal for comparison in compared) and not (missed or any(differing))
    return Comparison(
        schema=SCHEMA,
        a=str(sides[0].checkpoint.files.folder),
        b=str(sides[1].checkpoint.files.folder),
        options=options,
        equal=equal,
        tensors_equal=equal,
        settings_equal=None,
        kinds=compared,
        settings=(),
        facts=tuple(_facts(sides)),
        account_a=accounts[0],
        account_b=accounts[1],
        missed=missed,
        differing_copies_a=differing[0],
        differing_copies_b=differing[1],
    )


def _facts(sides: tuple[_Side, _Side]) -> Iterator[MetadataComparison]:
    a, b = sides
    rounded = [side.count_shifted() for side in sides]
    if any(rounded):
        values = (f"{quantity(count, 'norm')}, when 1 is subtracted" if count else "nothing" for count in rounded)
        yield MetadataComparison("rounded before", *values)
    decoded = [side.count_decoded() for side in sides]
    if any(decoded):
        values = (f"{quantity(count, 'weight')} with codes and scales" if count else "nothing" for count in decoded)
        yield MetadataComparison("decoded before", *values)
    if a.lacks_moments or b.lacks_moments:
        moments = ("zero: saved before the first step" if side.lacks_moments else "stored" for side in sides)
        yield MetadataComparison("moments", *moments)
    if a.rows or b.rows:
        yield MetadataComparison("vocabulary compared", a.vocabulary, b.vocabulary)
    yield from compare_metadata(a.checkpoint, b.checkpoint)


def _differing_copies(side: _Side, kinds: Sequence[str], team: Communicator) -> tuple[str, ...]:
    held = [(kind, name) for kind in kinds for name in side.names(kind)]
    shifted = {kind: shifted_names(side.checkpoint, kind) for kind in kinds if kind in side.kinds}

    def look(share: Sequence[tuple[str, str]]) -> Iterator[list[str]]:
        return (differing_copies_of(side.checkpoint, kind, name, shifted[kind], side.transfer) for kind, name in share)

    texts_of_tensors = map_shares(team, look, held, lambda pair: side.nbytes(*pair))
    return tuple(text for of_one in texts_of_tensors for text in of_one)


def _account(side: _Side, chosen: Sequence[str], kinds: Sequence[str] | None) -> Account:
    """Return what was compared of one checkpoint; derived kinds are compared with their sources."""
    left = {*carried_kinds(side.checkpoint)} - {*chosen}
    why = "of another kind than those to compare" if kinds is not None else "the other side has none"
    return account_of(side.checkpoint, leaves_out=left.__contains__, why=why)


def _is_missed(item: UnreadState, counted: Sequence[str]) -> bool:
    """Return True if a key of the compared kinds was not compared; `counted` is empty for all kinds."""
    is_weight = item.kind == WEIGHT and bool(item.nbytes) and (not counted or WEIGHT in counted)
    return is_weight or (not item.why and (not counted or item.kind in counted))


def _counts(kind: str, sides: tuple[_Side, _Side]) -> bool:
    """Return True if a kind is compared by default: not if one side has it only to derive another kind."""
    return all(kind in side.kinds for side in sides) or any(kind in carried_kinds(side.checkpoint) for side in sides)


def _sides(a: Location, b: Location, options: ComparisonOptions) -> tuple[_Side, _Side]:
    """Open both checkpoints, a Hugging Face folder with the other's vocabulary.

    B has the names of A's layer spec.
    """
    of_family = None
    if options.family:
        from mcore_ckpt_ext.families.recognition import family_named  # all families take 0.1 s to import

        of_family = family_named(options.family)
    opened = open_both((a, b), of_family, options.facts, options.weights)
    rows: list[int | None] = [None, None]
    for index, path in enumerate((a, b)):
        this = opened[index]
        other = opened[1 - index]
        if this.format.is_model_folder and not other.format.is_model_folder:
            from mcore_ckpt_ext.families.vision_towers import vision_model_type
            from mcore_ckpt_ext.formats.hugging_face.model import LOCAL
            from mcore_ckpt_ext.formats.hugging_face.vision import with_vision_tower

            rows[1 - index] = this.job.vocabulary()
            if vision_model_type(other.names(WEIGHT)) is not None:
                opened[index] = with_vision_tower(this)
            elif set(this.names(WEIGHT)) != set(other.names(WEIGHT)):
                opened[index] = open_checkpoint(path, family=of_family, transformer_impl=LOCAL)
    as_stored = all(checkpoint.format.is_model_folder for checkpoint in opened)  # neither is rounded then
    of_a = opened[0]
    of_b = with_names_of(opened[1], opened[0])
    return _Side(of_a, rows[0], as_stored), _Side(of_b, rows[1], as_stored)


class _Side:
    """One of the two checkpoints; if `rows` is given, only that many rows of its vocabulary are compared."""

    def __init__(self, checkpoint: CheckpointView, rows: int | None, as_stored: bool) -> None:
        self.lacks_moments = is_before_first_step(checkpoint)
        checkpoint = with_first_moments(checkpoint)
        self.checkpoint = checkpoint
        self.rows = rows
        self.source = with_cache(strip_shifts(checkpoint) if as_stored else checkpoint)
        self.transfer = Transfer(checkpoint.files.reader.past_cache(), workers=1)
        self._memory = BlockMemory()
        self.kinds = checkpoint.kinds()
        self._names = {kind: checkpoint.names(kind) for kind in self.kinds}

    def names(self, kind: str) -> list[str]:
        return self._names.get(kind, [])

    def tensor(self, kind: str, name: str) -> LogicalTensor:
        tensor = self.source.logical_tensor(kind, name)
        if tensor is None:
            where = f"{kind} {name}, {self.checkpoint.files.folder}"
            raise UnsupportedCheckpointError("a tensor has no elements", where=where)
        if self.rows and is_in_vocabulary(name) and tensor.shape[0] > self.rows:
            return replace(tensor, shape=(self.rows, *tensor.shape[1:]))
        return tensor

    @property
    def vocabulary(self) -> str:
        """The number of vocabulary rows that are compared, in words."""
        tensor = self.source.logical_tensor(WEIGHT, word_embeddings_in(self.checkpoint.names(WEIGHT)) or "")
        stored = tensor.shape[0] if tensor else 0
        if self.rows in (None, stored):
            return "all"
        return f"{self.rows} of {quantity(stored, 'row')}, as many as the other has"

    def nbytes(self, kind: str, name: str) -> int:
        tensor = self.source.logical_tensor(kind, name)
        return 0 if tensor is None else prod(tensor.shape) * int(getattr(torch, tensor.dtype).itemsize)

    def count_shifted(self) -> int:
        """Return the number of weights that are stored plus 1; in a coarse dtype they were rounded."""
        return self._count_weights(lambda extent: isinstance(extent, ReorderedMatrix) and bool(extent.shift))

    def count_decoded(self) -> int:
        """Return the number of weights that are stored quantized."""
        return self._count_weights(
            lambda extent: isinstance(extent.array if isinstance(extent, ReorderedMatrix) else extent, QuantizedMatrix)
        )

    def _count_weights(self, is_one: Callable[[Extent], bool]) -> int:
        """Return the number of weights of which an extent is one."""
        names = self.names(WEIGHT)
        return sum(any(is_one(stored.extent) for stored in self.source.stored_slices(WEIGHT, name)) for name in names)

    def read(self, kind: str, target: Slice) -> torch.Tensor:
        return read_slice(self.source, self.transfer, kind, target, allocate=self._memory.allocator(kind))


def _compare_tensor(
    sides: tuple[_Side, _Side], kind: str, name: str, counter: ByteCounter, pictures: bool
) -> TensorDifference:
    a, b = (side.tensor(kind, name) for side in sides)
    shapes = (a.shape, b.shape)
    dtypes = (a.dtype, b.dtype)
    if a.shape[1:] != b.shape[1:] or len(a.shape) != len(b.shape):
        return TensorDifference(kind, a.name, shapes, dtypes)
    row = prod(a.shape[1:])
    common = min(prod(a.shape), prod(b.shape))
    tally = DifferenceCounts(MapBuilder(a.shape) if pictures else None)
    for block in blocks((Region.whole(a.name, a.shape),), common):
        of_a = sides[0].read(kind, block)
        of_b = sides[1].read(kind, Slice((Region.whole(b.name, b.shape),), block.start, block.stop))
        tally.count(of_a, of_b, block.start)
        counter.add(of_a.nbytes)
    padding = None
    if a.shape != b.shape:
        longer, side, label = (a, sides[0], "A") if a.shape[0] > b.shape[0] else (b, sides[1], "B")
        padding = _padding(longer, side, label, kind, common, row)
    first = None if tally.first is None else (index_of(tally.first[0], a.shape), *tally.first[1:])
    return TensorDifference(
        kind,
        a.name,
        shapes,
        dtypes,
        common,
        tally.different,
        tally.signed_zeros,
        tally.largest,
        first,
        padding,
        where=tally.picture.finish() if tally.picture and tally.different else None,
    )


def _padding(tensor: LogicalTensor, side: _Side, label: str, kind: str, begin: int, row: int) -> PaddingRows:
    rows = Region(
        tensor.name,
        (begin // max(row, 1), *(0 for _ in tensor.shape[1:])),
        (tensor.shape[0] - begin // max(row, 1), *tensor.shape[1:]),
    )
    nonzero = sum(int((side.read(kind, block) != 0).sum()) for block in blocks((rows,)))
    return PaddingRows(label, rows.sizes[0], nonzero)


def _kind_comparison(sides: tuple[_Side, _Side], kind: str, results: list[TensorDifference]) -> KindComparison:
    names = [sides[0].names(kind), sides[1].names(kind)]
    sets = [set(of_side) for of_side in names]
    return KindComparison(
        kind=kind,
        compared=len(results),
        elements=sum(result.elements for result in results),
        only_in_a=tuple(name for name in names[0] if name not in sets[1]),
        only_in_b=tuple(name for name in names[1] if name not in sets[0]),
        different=tuple(result for result in results if result.differs),
    )
