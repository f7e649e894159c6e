"""Draws the pictures of the documentation from the real checkpoints in `tests/data`.

python scripts/documentation/drawings.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import prod
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
PICTURES = REPOSITORY / "docs" / "pictures"
WIDTH = 960
TRACED = "decoder.layers.1.mlp.linear_fc1.weight"
# For each format: the fixture, the name of the picture, and the writer.
FORMATS = (
    ("p01", "dp_reshardable", "Megatron 0.15 and later, default"),
    ("p04", "fully_reshardable", "Megatron 0.15 and later, opt-in"),
    ("p05", "fully_sharded_model_space", "Megatron 0.8 to 0.14, default"),
    ("p06", "dp_zero_gather_scatter", "Megatron 0.7 to 0.14"),
    ("p07", "fully_sharded_bucket_space", "Megatron 0.6 and 0.7"),
    ("p41", "no_distributed_optimizer", "all, without --use-distributed-optimizer"),
    ("p08b", "legacy_torch", "all, with --ckpt-format torch"),
    ("p08c", "legacy_torch_per_parameter", "all, with --ckpt-format torch and without distributed optimizer"),
    ("p32", "zarr", "Megatron 0.7 to 0.11"),
)
# Formats without a fixture of a framework; they are converted from one.
CONVERTED = "p02"
_KINDS = ("weight", "fp32_param", "exp_avg", "exp_avg_sq", "other")
_STYLE = """
text { font: 13px system-ui, "Segoe UI", Roboto, sans-serif; fill: #1b1e24 }
.small { font-size: 11px } .title { font-size: 16px; font-weight: 600 }
.mono { font-family: ui-monospace, Menlo, monospace }
.soft { fill: #667085 } .ground { fill: #ffffff } .empty { fill: #dfe3ea }
.flow { fill: #c2416b; opacity: .18 } .traced { fill: #c2416b }
.c0 { fill: #3457d5 } .c1 { fill: #12a594 } .c2 { fill: #e5a50a } .c3 { fill: #8e4ec6 } .c4 { fill: #8d99ae }
@media (prefers-color-scheme: dark) {
  text { fill: #e7e9ee } .soft { fill: #9aa3b2 } .ground { fill: #15181f } .empty { fill: #2b303b }
  .c0 { fill: #7d95f5 } .c1 { fill: #3fcfbf } .c2 { fill: #f2c14e } .c3 { fill: #bd8bea } .c4 { fill: #7e889b }
  .flow { fill: #ec7fa4; opacity: .25 } .traced { fill: #ec7fa4 }
}
"""


class Drawing:
    """An SVG picture: shapes in the order in which they were added."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []
        self.height = 0.0

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Add a box of style class `kind`."""
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}"/>')
        self.height = max(self.height, y + height)

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Add a line of text with its baseline at `y`."""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')
        self.height = max(self.height, y + 4)

    def flow(self, upper: tuple[float, float], lower: tuple[float, float], top: float, bottom: float) -> None:
        """Connect one stretch (left and right end) at `top` with another at `bottom`."""
        corners = ((upper[0], top), (upper[1], top), (lower[1], bottom), (lower[0], bottom))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self._parts.append(f'<polygon points="{points}" class="flow"/>')

    def __str__(self) -> str:
        height = self.height + 20
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
            f'aria-label="{escape(self._title)}"><title>{escape(self._title)}</title><style>{_STYLE}</style>'
            f'<rect class="ground" width="{WIDTH}" height="{height:.0f}" rx="8"/>' + "\n".join(self._parts) + "</svg>\n"
        )


@dataclass(frozen=True)
class Stretch:
    """Elements `first` to `last` (one past the end) of a row of the drawing, and their parameter."""

    name: str
    first: int
    last: int


def layouts(one: Path, other: Path) -> str:
    """Draw the gradient buffers of two layouts, and the model space between them."""
    from mcore_ckpt_ext import inspect, open_checkpoint

    upper, lower = inspect(one, buffers=True), inspect(other, buffers=True)
    checkpoint = open_checkpoint(one)
    model: list[Stretch] = []
    for name in checkpoint.names("weight"):
        begin = model[-1].last if model else 0
        tensor = checkpoint.logical_tensor("weight", name)
        model.append(Stretch(name, begin, begin + prod(tensor.shape if tensor else ())))
    picture = Drawing("Gradient buffers of two layouts, and the model space between them")
    picture.text(20, 30, f"{upper.layout_text}: four gradient buffers, as the checkpoint holds them", "title")
    above = _rows(picture, _buffers(upper), 62)
    picture.text(20, 150, f"Model space: {model[-1].last:,} elements by name, the same under every layout", "title")
    ((_, between),) = _rows(picture, [("", model[-1].last, model)], 162).items()
    picture.text(20, 250, f"{lower.layout_text}: four other buffers, as the resumed job needs them", "title")
    below = _rows(picture, _buffers(lower), 282)
    for places in above.values():
        picture.flow(places[TRACED], between[TRACED], 86, 162) if TRACED in places else None
    middle = sum(between[TRACED]) / 2
    halves = [places[TRACED] for places in below.values() if TRACED in places]
    for index, place in enumerate(halves):
        half = (between[TRACED][0], middle) if index == 0 else (middle, between[TRACED][1])
        picture.flow(half, place, 186, 282)
    picture.text(20, 342, f"red: {TRACED}, {_where(upper)}, {_where(lower)}", "small")
    for index, text in enumerate(("layer 0", "layer 1", "layer 2", "layer 3", "embeddings, final norm")):
        picture.rect(20 + index * 90, 354, 10, 10, f"c{index}")
        picture.text(35 + index * 90, 363, text, "small")
    picture.rect(570, 354, 10, 10, "empty")
    picture.text(585, 363, "padding", "small")
    return str(picture)


def _where(found: Any) -> str:
    places = [
        f"element {first:,}" for buffer in found.buffers for name, first, _ in buffer.parameters if name == TRACED
    ]
    return f"{' and '.join(dict.fromkeys(places))} of {len(places)} of the buffers ({found.layout_text})".replace(
        " of 1 of the buffers", " of one buffer"
    ).replace(" of 2 of the buffers", " of two buffers")


def _buffers(found: Any) -> list[tuple[str, int, list[Stretch]]]:
    """Return the buffers of a row: label, elements, parameters; buckets of a group are concatenated."""
    groups: dict[str, tuple[int, list[Stretch]]] = {}
    for buffer in found.buffers:
        begin, stretches = groups.get(buffer.group, (0, []))
        stretches += [Stretch(name, begin + first, begin + last) for name, first, last in buffer.parameters]
        groups[buffer.group] = (begin + buffer.numel, stretches)
    return [(f"{_rank(name)}: {numel:,} elements", numel, stretches) for name, (numel, stretches) in groups.items()]


def _rank(group: str) -> str:
    """Return `TP 0, PP 1` for `optimizer 0, dp_group_idx_1 (tensor rank 0, pipeline rank 1)`."""
    return group.partition("(")[2].rstrip(")").replace("tensor rank", "TP").replace("pipeline rank", "PP")


def _rows(
    picture: Drawing, buffers: Sequence[tuple[str, int, list[Stretch]]], top: float
) -> dict[int, dict[str, tuple[float, float]]]:
    """Draw buffers next to each other, and return the ends of each parameter by the number of the buffer."""
    gap = 14
    scale = (WIDTH - 40 - gap * (len(buffers) - 1)) / sum(numel for _, numel, _ in buffers)
    places: dict[int, dict[str, tuple[float, float]]] = {}
    x = 20.0
    for index, (label, numel, stretches) in enumerate(buffers):
        picture.text(x, top - 8, label, "small soft")
        picture.rect(x, top, numel * scale, 24, "empty")
        places[index] = {}
        for one in stretches:
            left, right = x + one.first * scale, x + one.last * scale
            places[index][one.name] = (left, right)
            kind = "traced" if one.name == TRACED else _color(one.name)
            picture.rect(left, top, max(0.3, right - left - 0.4), 24, kind)
        x += numel * scale + gap
    return places


def _color(name: str) -> str:
    parts = name.split(".")
    return f"c{int(parts[2]) % 4}" if parts[:2] == ["decoder", "layers"] else "c4"


def stored(path: Path, name: str, who: str) -> str:
    """Draw the files of a checkpoint, and the location of one parameter (its first moment, if there is one)."""
    from mcore_ckpt_ext import inspect, open_checkpoint

    found = inspect(path)
    checkpoint = open_checkpoint(path)
    picture = Drawing(f"What lies in a checkpoint in {name}")
    picture.text(20, 30, f"{name}: {who}", "title")
    picture.text(20, 50, f"a small GPT, {found.layout_text}, {found.bytes_on_disk:,} bytes on disk", "small soft")
    files = [(file.file, {kind: file.bytes_by_kind.get(kind, 0) for kind in _KINDS}) for file in found.files]
    if len(files) > 20:
        files = _folders(files)
    shown = files[:20]
    most = max(sum(kinds.values()) for _, kinds in shown)
    y = 66.0
    for label, kinds in shown:
        picture.text(330, y + 11, _short(label), "small mono", "end")
        x = 340.0
        for index, kind in enumerate(_KINDS):
            picture.rect(x, y, kinds[kind] / most * 520, 13, f"c{index}")
            x += kinds[kind] / most * 520
        picture.text(x + 6, y + 11, f"{sum(kinds.values()):,}", "small soft")
        y += 18
    if len(files) > len(shown):
        picture.text(330, y + 11, f"and {len(files) - len(shown):,} more", "small soft", "end")
        y += 18
    y += 10
    for index, kind in enumerate(_KINDS):
        picture.rect(340 + index * 100, y, 10, 10, f"c{index}")
        picture.text(355 + index * 100, y + 9, kind, "small")
    y += 40
    _trace(picture, checkpoint, y)
    return str(picture)


def _trace(picture: Drawing, checkpoint: Any, y: float) -> None:
    """Draw the location of one parameter: its elements above, the pieces of files below."""
    kind = "exp_avg" if "exp_avg" in checkpoint.kinds() else "weight"
    names = checkpoint.names(kind)
    name = TRACED if TRACED in names else next(name for name in reversed(names) if "linear_fc1.weight" in name)
    tensor = checkpoint.logical_tensor(kind, name)
    pieces = checkpoint.stored_slices(kind, name)
    total = prod(tensor.shape)
    picture.text(20, y, f"{kind} of {name}, {' x '.join(map(str, tensor.shape))}", "mono")
    begin = 0.0
    for piece in pieces:
        numel, extent = piece.slice.numel, piece.extent
        width = numel / total * (WIDTH - 40)
        picture.rect(20 + begin, y + 12, width - 3, 22, "traced")
        picture.text(20 + begin, y + 50, f"{numel:,} elements in {_short(extent.file)}", "small")
        whole = piece.first == 0 and extent.numel == numel
        told = "an array of its own" if whole else f"from element {piece.first:,} of an array of {extent.numel:,}"
        picture.text(20 + begin, y + 66, told, "small soft")
        begin += width


def _folders(files: Sequence[tuple[str, dict[str, int]]]) -> list[tuple[str, dict[str, int]]]:
    """Combine files by folder if there are many folders, as in zarr."""
    folders: dict[str, dict[str, int]] = {}
    for file, kinds in files:
        sums = folders.setdefault(f"{file.rpartition('/')[0]}/", dict.fromkeys(_KINDS, 0))
        for kind, size in kinds.items():
            sums[kind] += size
    return sorted(folders.items(), key=lambda item: -sum(item[1].values()))


def _short(text: str, most: int = 46) -> str:
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-most // 2 :]}"


def pictures(run_of: Callable[[str], Path]) -> dict[str, str]:
    """Return all drawings by file name; `run_of` returns the run folder for a fixture's number."""
    from mcore_ckpt_ext import Canonical, HuggingFace, convert

    drawn = {f"{name}.svg": stored(run_of(number), name, who) for number, name, who in FORMATS}
    with tempfile.TemporaryDirectory() as scratch:
        for name, target in (("hugging_face", HuggingFace()), ("canonical", Canonical())):
            convert(run_of(CONVERTED), Path(scratch) / name, target)
            drawn[f"{name}.svg"] = stored(Path(scratch) / name, name, "convert of this package")
    return {"layouts.svg": layouts(run_of("p01"), run_of("p08")), **drawn}


def main() -> int:
    """Write all drawings."""
    sys.path[:0] = [str(REPOSITORY)]
    from tests.harness.checkpoints import fixture_named

    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, text in pictures(lambda number: fixture_named(number).run).items():
        (PICTURES / name).write_text(text, encoding="utf-8")
        print(PICTURES / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
