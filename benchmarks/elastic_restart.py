"""Measures the time from a node's SIGKILL to the next step, and the share of this package's choice and load in it.

    python benchmarks/elastic_restart.py FOLDER [--runs 3] [--layers 4] [--hidden 512] [--quick]

Two of torchrun's agents with a CPU rank each train; one is killed, and the job goes on by itself on the other's rank,
TP1 x PP2 as TP1 x PP1. The rendezvous has torchrun's own limits, or with --quick those of the tests. Workers are new
processes, as torchrun's are. Shown are the medians of each part.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from command_line import parser_of
from elastic_parts import MARKS, seconds_of_parts, share_of_package
from megatron_on_cpu import toy_jobs
from megatron_on_cpu.elastic_jobs import Scenario

GOAL_SHARE = 0.1
# `RendezvousSettings` and `RendezvousTimeout` (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, torch 2.13).
DEFAULTS = {"keep_alive_interval": 5, "keep_alive_max_attempt": 3, "last_call_timeout": 30}
SAVED, KILLED, LAST = 2, 3, 4


def run_once(folder: Path, layers: int, hidden: int, rendezvous: dict[str, int]) -> dict[str, float]:
    """Run a job through the death of a node, and return the seconds of each part."""
    run = folder / "checkpoints"
    size = ["--num-layers", str(layers), "--hidden-size", str(hidden)]
    elastic = ["--ckpt-ext-layout", "auto", "--make-vocab-size-divisible-by", "128"]
    scenario = Scenario(
        folder,
        toy_jobs.tiny_gpt(1, 2, iterations=LAST, save=run, save_interval=SAVED, load=run, more=[*size, *elastic]),
        ranks=1,
        steps=[(rf"iteration +{KILLED}/", "SIGKILL", 1)],
        plugins=[MARKS],
        forks=False,
        rendezvous=rendezvous,
        timeout=500,
    )
    return seconds_of_parts(scenario.run().timeline, "SIGKILL 1")


def main() -> None:
    """Run the jobs in turn, and print the medians."""
    parser = parser_of(__doc__, runs=3, layers=4, hidden=512)
    parser.add_argument("--quick", action="store_true", help="the rendezvous of the tests instead of torchrun's limits")
    options = parser.parse_args()
    rendezvous = {} if options.quick else DEFAULTS
    runs = [
        run_once(options.folder / f"run-{number}", options.layers, options.hidden, rendezvous)
        for number in range(options.runs)
    ]
    for part in runs[0]:
        values = [run[part] for run in runs]
        print(f"| {part} | {statistics.median(values):.2f} s | {min(values):.2f} to {max(values):.2f} s |")
    print(f"together {statistics.median(sum(run.values()) for run in runs):.1f} s")
    share = statistics.median(share_of_package(run) for run in runs)
    print(f"choice and load {share:.1%} of it (goal {GOAL_SHARE:.0%})")


if __name__ == "__main__":
    main()
