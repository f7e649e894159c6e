"""Measures rehearsing the resume of a very large job with all of its ranks (`mcore-ckpt plan --rehearse`).

    python benchmarks/rehearsal.py FOLDER [--model llama deepseek] [--ranks 2048 16384] [--runs 3]

The checkpoints are those of `planning.py`, with all metadata and holes for tensors:

    llama       Llama 405B, 126 layers, from TP8 x PP16 as TP4 x PP32
    deepseek    DeepSeek-V3 671B, 61 layers of 256 experts, from PP16 x EP64 as PP8 x EP64

Each rehearsal runs in a separate process. Seconds are those from the call to the result, without imports; the memory is
the peak of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import planning
from command_line import parser_of

from mcore_ckpt_ext.rehearsal.rehearse import rehearse
from mcore_ckpt_ext.rehearsal.target import sizes_in

CASES = {"llama": ("llama 126", "tp=4 pp=32"), "deepseek": ("deepseek", "pp=8 ep=64")}
GOAL_SECONDS, GOAL_BYTES = {"llama": 20.0, "deepseek": 60.0}, 4 << 30


def rehearse_once(folder: Path, model: str, ranks: int) -> dict[str, float]:
    """Rehearse, and return the measurements."""
    begun, busy = time.monotonic(), time.process_time()
    found = rehearse(folder, ranks, sizes_in(CASES[model][1]))
    seconds, busy = time.monotonic() - begun, time.process_time() - busy
    assert found.will_succeed, found.refusal  # noqa: S101 - a refused rehearsal does not simulate all ranks
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "processor": busy, "memory": memory, "parts": found.parts, "elements": found.elements}


def main() -> None:
    """Make the checkpoints, and measure in turn."""
    parser = parser_of(__doc__, runs=3)
    parser.add_argument("--model", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(rehearse_once(options.folder, options.once, options.ranks[0])))
        return
    for model, ranks in [(model, ranks) for model in options.model for ranks in options.ranks]:
        case = CASES[model][0]
        folder = planning.made_folder(options.folder, case, ranks)
        command = [sys.executable, __file__, str(folder), "--once", model, "--ranks", str(ranks)]
        outputs = [
            subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(options.runs)
        ]
        runs = [json.loads(output.splitlines()[-1]) for output in outputs]
        seconds, busy = (statistics.median(run[key] for run in runs) for key in ("seconds", "processor"))
        memory = max(run["memory"] for run in runs)
        print(
            f"| {model}, {ranks} ranks | {seconds:.1f} s (goal {GOAL_SECONDS[model]:.0f}), {busy:.1f} of the processor "
            f"| {memory / 2**20:.0f} MiB (goal {GOAL_BYTES >> 20}) | {runs[-1]['parts']:,} parts, "
            f"{runs[-1]['elements']:,} elements of the optimizer |"
        )


if __name__ == "__main__":
    main()
