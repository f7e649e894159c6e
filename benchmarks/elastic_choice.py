"""Measures the choice of a layout for a very large job that has lost a node, from the index of its checkpoint.

    python benchmarks/elastic_choice.py FOLDER [--model llama deepseek] [--ranks 8192 16384] [--runs 5]

The checkpoints are those of `planning.py`: all metadata, with holes for tensors. Each run is a process of its own, as
the first rank of a job; what it has imported before does not count. Shown are the medians, of the time and of the
processor's, with and without opening the checkpoint.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from planning import chosen_cases, made_folder, parsed_cases

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.operations.elastic_layout import choose_for
from mcore_ckpt_ext.operations.iteration_health import iteration_health_of
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_folder
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from mcore_ckpt_ext.storage.gc_pause import collector_paused
from mcore_ckpt_ext.versions import Version

GOAL_SECONDS = 1.0
GPUS_PER_NODE = 8
BATCH = {"global_batch_size": 2048, "micro_batch_size": 1, "seq_length": 8192}


def choose_once(folder: Path, ranks: int) -> dict[str, object]:
    """Choose for one node less, and return the durations."""
    begun, busy = time.monotonic(), time.process_time()
    index = FolderIndex(iteration_folder(folder))
    iteration_health_of(folder, index=index)
    looked = time.process_time() - busy
    checkpoint = open_checkpoint(index.folder, index=index)
    opened = time.process_time() - busy
    chosen = choose_for(
        checkpoint, ranks - GPUS_PER_NODE, arguments=BATCH, gpus_per_node=GPUS_PER_NODE, gpu_memory=None,
        version=Version(0, 19), may_change_batch=False,
    )  # fmt: skip
    return {
        "looked": looked, "opened": opened - looked, "chose": time.process_time() - busy - opened,
        "seconds": time.monotonic() - begun, "reason": chosen.reason,
    }  # fmt: skip


def main() -> None:
    """Make the checkpoints, and measure in turn."""
    options = parsed_cases(__doc__)
    if options.once:
        with collector_paused():  # as in a job
            print(json.dumps(choose_once(options.folder, options.ranks[0])))
        return
    print(f"goal: {GOAL_SECONDS} s of the processor")
    for name, ranks in chosen_cases(options):
        folder = made_folder(options.folder, name, ranks)
        runs = []
        for _ in range(options.runs):
            command = [sys.executable, __file__, str(folder), "--once", name, "--ranks", str(ranks)]
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(json.loads(result.stdout))
        parts = (statistics.median(run[part] for run in runs) for part in ("looked", "opened", "chose", "seconds"))
        looked, opened, chose, seconds = parts
        print(
            f"| {name}, {ranks} ranks | {chose:.2f} s to choose; before, {looked:.2f} to look whether all is there "
            f"and {opened:.2f} to open it; {seconds:.2f} s by the clock | {runs[-1]['reason']} |"
        )


if __name__ == "__main__":
    main()
