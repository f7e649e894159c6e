"""Measures how much this package adds to the stall of training in a save, and the effect of a slow writer on steps.

    python benchmarks/saving.py FOLDER [--runs 5] [--layers 8 --hidden 256] [--ranks 8] [--steps 60] [--remainders]

Real Megatron 0.19.2 trains on CPU ranks (pipelines of two) and saves asynchronously every eighth iteration; jobs with
the package and without it (`MCORE_CKPT_EXT=0`, Megatron's own flags for the same save) are run in turn. The stall of a
save is the time in `save_checkpoint` and in `maybe_finalize_async_save` on rank 0. The first save of a job is reported
separately, because the sidecar is then gathered, once, and the processes warm up. The ratio of the medians is noisy on
a small machine, so the time in this package's own functions is also reported, measured in the same saves.

With `--remainders` the jobs have a precision-aware optimizer, so that the package also digests remainders at every
save, on a thread in parallel to planning; `begin` and `share` are the parts that the save waits for (goal 2 % of the
stall). Nothing else is measured then.

Then one job runs with writers slowed by five seconds: the median step during a save against the median of all others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "scripts"))

from command_line import parser_of  # noqa: E402 - command_line.py in this folder
from megatron_on_cpu import launch, toy_jobs  # noqa: E402 - the path is set above

PLUGIN = Path(__file__).with_name("saving_rank.py")
STOCK_FLAGS = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]
REMAINDERS = ["--use-precision-aware-optimizer"]
# Steps between two saves: enough for the first to be on disk, as in real jobs.
INTERVAL, SAVES, SLOWED = 8, 6, 5.0


def job(folder: Path, options: argparse.Namespace, name: str, plugged: bool, slowed: float = 0.0) -> dict[str, Any]:
    """Run one job, and return the measurements of its rank 0."""
    iterations, interval = (INTERVAL * SAVES, INTERVAL) if not slowed else (options.steps, options.steps // 3)
    arguments = toy_jobs.tiny_gpt(
        1, 2, iterations=iterations, save=folder / name, save_interval=interval,
        more=["--num-layers", str(options.layers), "--hidden-size", str(options.hidden), *STOCK_FLAGS,
              *(REMAINDERS if options.remainders else ())],
    )  # fmt: skip
    plugins = [launch.PRECISION_AWARE, PLUGIN] if options.remainders else [PLUGIN]
    report = folder / f"{name}.json"
    environment = {
        "MCORE_CKPT_EXT": "1" if plugged else "0",
        "SAVING_REPORT": str(report),
        "SAVING_SLOWED": str(slowed),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "scripts"), str(REPOSITORY / "benchmarks")]),
    }
    result = launch.run(
        options.ranks, launch.TRAIN_GPT, arguments, timeout=600, environment=environment, plugin_files=plugins
    )
    if result.returncode:
        raise SystemExit(result.output[-4000:])
    return dict(json.loads(report.read_text()))


def main() -> None:
    """Run all jobs and print the comparison."""
    parser = parser_of(__doc__, runs=5, layers=8, hidden=256, ranks=8, steps=60)
    parser.add_argument("--remainders", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    stalls: dict[bool, list[float]] = {False: [], True: []}
    own: list[dict[str, float]] = []
    first: list[float] = []
    for number in range(options.runs):
        for plugged in (False, True):
            measured = job(options.folder, options, f"{number}-{plugged}", plugged)
            stalls[plugged] += measured["stalls"][1:]
            if plugged:
                own += measured["own"][1:]
                first.append(sum(measured["own"][0].values()))
    stock, ours = statistics.median(stalls[False]), statistics.median(stalls[True])
    part = statistics.median(sum(parts.values()) for parts in own)
    print(
        f"stall of a save, median of {len(stalls[False])}: unplugged {stock:.3f} s, plugged {ours:.3f} s: "
        f"{ours / stock:.3f} x"
    )
    print(
        f"in this package's own functions: {part * 1e3:.2f} ms a save, {100 * part / stock:.2f} % of the stall; "
        f"the first save {statistics.median(first) * 1e3:.1f} ms"
    )
    for name in sorted({name for parts in own for name in parts}):
        seconds = statistics.median(parts.get(name, 0.0) for parts in own)
        print(f"  {name}: {seconds * 1e3:.2f} ms, {100 * seconds / stock:.2f} %")
    if options.remainders:
        return
    steps = job(options.folder, options, "slowed", True, SLOWED)["steps"]
    under_way, usual = statistics.median(steps["under way"]), statistics.median(steps["usual"])
    print(
        f"writers slowed by {SLOWED:.0f} s: a step {under_way * 1e3:.1f} ms under way of a save "
        f"({len(steps['under way'])} steps), {usual * 1e3:.1f} ms otherwise ({len(steps['usual'])}): "
        f"{under_way / usual:.2f} x"
    )


if __name__ == "__main__":
    main()
