"""Conversions, optimizer included, against copying the same bytes: interleaved, medians, peak memory.

    python benchmarks/conversion.py FOLDER [--runs 5] [--layers 12 --hidden 1536]

Makes a checkpoint of about 6 GB below FOLDER. Every run ends when the bytes are on the disk: a conversion flushes
before it publishes, and the copy is followed by a flush of what it wrote. Peak memory is the growth of a process of
its own, after its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import synthetic

_CONVERT = """
import json, resource, sys, torch, mcore_ckpt_ext
from mcore_ckpt_ext.offline import conversion
from mcore_ckpt_ext.targets import TARGETS
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import time
begun = time.monotonic()
target = TARGETS[sys.argv[3]](**json.loads(sys.argv[4]))
mcore_ckpt_ext.convert(sys.argv[1], sys.argv[2], target)
seconds = time.monotonic() - begun
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "memory": (after - before) * 1024}))
"""

WORK = {
    "torch_dist to torch_dist": ("source", "torch_dist", {}),
    "torch_dist to legacy, TP2 x PP2": (
        "source", "legacy", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    ),
    "legacy to torch_dist": ("legacy", "torch_dist", {}),
}  # fmt: skip


def convert(source: Path, destination: Path, to: str, options: dict[str, int]) -> dict[str, float]:
    """One conversion in a process of its own."""
    command = [sys.executable, "-c", _CONVERT, str(source), str(destination), to, json.dumps(options)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(result.stdout)
    return found


def copy(source: Path, destination: Path) -> float:
    """Seconds to copy a folder durably."""
    begun = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(destination)], check=True)
    for path in destination.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.monotonic() - begun


def main() -> None:
    """Measure, and print the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    for name, default in (("layers", 12), ("hidden", 1536), ("feed-forward", 4096), ("vocabulary", 32000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    folder: Path = options.folder
    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "feed_forward", "vocabulary")}
    total = synthetic.make(folder / "source", **sizes, file_bytes=1 << 29)
    print(f"source: {total / 1e9:.2f} GB")
    for what, (source, to, wanted) in WORK.items():
        if source == "legacy" and not (folder / "legacy").exists():
            convert(folder / "source", folder / "legacy", "legacy", {})
        seconds: list[float] = []
        copies: list[float] = []
        memory = 0.0
        for _ in range(options.runs):
            done = convert(folder / source, folder / "out", to, wanted)
            seconds.append(done["seconds"])
            memory = max(memory, done["memory"])
            copies.append(copy(folder / "out", folder / "copy"))
            shutil.rmtree(folder / "out")
            shutil.rmtree(folder / "copy")
        ours, theirs = statistics.median(seconds), statistics.median(copies)
        cells = f"{ours:.1f} s | {theirs:.1f} s | {ours / theirs:.2f} x | {memory / 2**20:.0f} MiB"
        print(f"| {what} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
