"""Measures how much the master check after a load adds to the load.

    python benchmarks/proof.py FOLDER [--runs 3] [--layers 24 --hidden 1024] [--ranks 8] [--pipeline 4]

Real Megatron 0.19.2 on CPU ranks saves once (by default 4 GB). Then it resumes under the same layout, with a load by
stock Megatron alone, and with pipelines of half the length, where this package resumes the optimizer. Each row shows
the load's time on the slowest rank, the fraction of the check in it as the mean of all ranks, and the same fraction of
all ranks' processor time, which is relevant if ranks share processors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "scripts"))

from command_line import parser_of  # noqa: E402 - command_line.py in this folder
from megatron_on_cpu import launch, toy_jobs  # noqa: E402 - the path is set above
from memory import bytes_of  # noqa: E402

PLUGIN = Path(__file__).with_name("proof_rank.py")
GOAL = 0.02


def run(options: argparse.Namespace, pipeline: int, name: str, *, loads: bool) -> list[dict[str, float]]:
    """Run one job of one iteration, and return the measurements of its ranks."""
    run_folder, report = options.folder / "checkpoints", options.folder / name
    report.mkdir(parents=True, exist_ok=True)
    size = ["--num-layers", str(options.layers), "--hidden-size", str(options.hidden)]
    arguments = toy_jobs.tiny_gpt(
        1, pipeline, iterations=2, save=None if loads else run_folder, save_interval=1,
        load=run_folder if loads else None, more=[*size, "--exit-interval", "1"],
    )  # fmt: skip
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "scripts")])
    environment = {"PROOF_REPORT": str(report), "PYTHONPATH": paths}
    result = launch.run(
        options.ranks, launch.TRAIN_GPT, arguments, timeout=900, environment=environment, plugin_files=[PLUGIN]
    )
    if result.returncode:
        raise SystemExit(result.output[-4000:])
    return [json.loads(path.read_text()) for path in sorted(report.iterdir())] if loads else []


def main() -> None:
    """Save once, load several times, print the ratios."""
    parser = parser_of(__doc__, runs=3, layers=24, hidden=1024, ranks=8, pipeline=4)
    options = parser.parse_args()
    if not (options.folder / "checkpoints").exists():
        run(options, options.pipeline, "saved", loads=False)
    size = bytes_of(options.folder / "checkpoints")
    print(f"checkpoint of {size / 1e9:.2f} GB", flush=True)
    for pipeline, who in ((options.pipeline, "stock"), (options.pipeline // 2, "the package")):
        loads, shares, busy = [], [], []
        for number in range(options.runs):
            ranks = run(options, pipeline, f"{who}-{number}", loads=True)
            loads.append(max(rank["load"] for rank in ranks))
            shares.append(statistics.mean(rank["proof"] / rank["load"] for rank in ranks))
            busy.append(sum(rank["proof processor"] for rank in ranks) / sum(rank["load processor"] for rank in ranks))
        median = statistics.median(loads)
        print(
            f"loaded by {who}: {median:.1f} s, of it the proof {100 * statistics.median(shares):.2f} % "
            f"(goal {100 * GOAL:.0f} %); of the processors' time {100 * statistics.median(busy):.2f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
