"""Measures conversions, including the optimizer, against a bare copy of the same bytes: medians, peak memory.

    python benchmarks/conversion.py FOLDER [--runs 5] [--workers 1 2] [--layers 12 --hidden 1536]

Makes a checkpoint of about 6 GB in FOLDER. Every run ends when the bytes are on disk: a conversion flushes before it
publishes, and the bound is `sendfile` of the written files with a flush of each. Processor seconds, per written
gigabyte, are user and system time of all threads; peak memory is the growth of a separate process after its imports.
Before each run the source is read, and half as many bytes are written and removed: see `memory.py`. With several
numbers of workers, all are run in turn. In `/dev/shm` no run waits for a disk, which shows the effect of a second
worker.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import synthetic
from command_line import parser_of

_CONVERT = """
import json, resource, sys, torch, mcore_ckpt_ext
from mcore_ckpt_ext.operations import conversion
from mcore_ckpt_ext.targets import TARGETS
from stream import readied
import time
readied(sys.argv[1], sys.argv[2] + ".touched")
before = resource.getrusage(resource.RUSAGE_SELF)
begun = time.monotonic()
target = TARGETS[sys.argv[3]](**json.loads(sys.argv[4]))
mcore_ckpt_ext.convert(sys.argv[1], sys.argv[2], target, workers=int(sys.argv[5]))
seconds = time.monotonic() - begun
after = resource.getrusage(resource.RUSAGE_SELF)
busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(json.dumps({"seconds": seconds, "busy": busy, "memory": (after.ru_maxrss - before.ru_maxrss) * 1024}))
"""

WORK = {
    "torch_dist to torch_dist": ("source", "torch_dist", {}),
    "torch_dist to legacy, TP2 x PP2": (
        "source", "legacy", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    ),
    "legacy to torch_dist": ("legacy", "torch_dist", {}),
}  # fmt: skip


def convert(source: Path, destination: Path, to: str, options: dict[str, int], workers: int = 2) -> dict[str, float]:
    """Run one conversion in a separate process."""
    return _measured(_CONVERT, source, destination, to, json.dumps(options), workers)


def stream(source: Path, destination: Path) -> dict[str, float]:
    """Run the bare copy in a separate process."""
    return _measured("import stream, sys; stream.main(*sys.argv[1:])", source, destination)


def _measured(program: str, *arguments: object) -> dict[str, float]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, float] = json.loads(result.stdout)
    return found


def main() -> None:
    """Measure, and print the rows of the table."""
    parser = parser_of(__doc__, runs=5, layers=12, hidden=1536, feed_forward=4096, vocabulary=32000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    folder: Path = options.folder
    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "feed_forward", "vocabulary")}
    total = synthetic.make(folder / "source", **sizes, file_bytes=1 << 29)
    print(f"source: {total / 1e9:.2f} GB")
    for what, (source, to, wanted) in WORK.items():
        if source == "legacy" and not (folder / "legacy").exists():
            convert(folder / "source", folder / "legacy", "legacy", {})
        ours: dict[int, list[dict[str, float]]] = {}
        bounds: list[dict[str, float]] = []
        for workers in options.workers * options.runs:
            ours.setdefault(workers, []).append(convert(folder / source, folder / "out", to, wanted, workers))
            bounds.append(stream(folder / "out", folder / "copy"))
            shutil.rmtree(folder / "out")
            shutil.rmtree(folder / "copy")
        for workers, runs in ours.items():
            print_row(f"{what}, {workers} {'worker' if workers == 1 else 'workers'}", runs, bounds)


def print_row(what: str, ours: list[dict[str, float]], bounds: list[dict[str, float]]) -> None:
    """Print one row of the table: medians, and those of the bound."""
    seconds, bound = (statistics.median(run["seconds"] for run in runs) for runs in (ours, bounds))
    busy, least = (statistics.median(run["busy"] for run in runs) for runs in (ours, bounds))
    written = bounds[0]["bytes"] / 1e9
    memory = max(run["memory"] for run in ours) / 2**20
    cells = f"{seconds:.1f} s | bound {bound:.1f} s | {seconds / bound:.2f} x | {memory:.0f} MiB"
    print(f"| {what} | {cells} | {busy / written:.2f} processor s/GB, bound {least / written:.2f} |", flush=True)


if __name__ == "__main__":
    main()
