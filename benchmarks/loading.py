"""Measures whole loads of a real job, by stock Megatron and by this package, against `preadv` of the same bytes.

    python benchmarks/loading.py FOLDER [--runs 5] [--layers 24 --hidden 1024] [--ranks 8] [--ways fast moved ...]
        [--megatron CHECKOUT] [--device cuda]

Real Megatron (installed, or a checkout of Megatron-LM) on CPU ranks saves TP1 x PP4 once (by default 4 GB; the twin in
`fully_reshardable`, which takes several times the memory). Then jobs run in turn, each of which loads once:

    stock      Megatron's own load, unchanged layout, without this package
    fast       `--ckpt-ext-load fast`, unchanged layout
    once       the same with `--ckpt-ext-read-once`
    moved      TP2 x PP2, which only this package supports (`auto`)
    twin       TP2 x PP2 from the `fully_reshardable` twin, the only format that Megatron can load so
    cold stock, cold fast, cold moved    the same with the checkpoint evicted from the page cache, as for the bound

With `--device cuda` one rank runs on each GPU, as TP1 with one stage per rank: `stock` and `fast` load their own save,
`moved` that of CPU ranks as above, as TP1 x PP1.

Each load is followed by its bound: the same number of processes read, into new memory, as many bytes of the same files
as the ranks have afterwards, or requested if that is less. Before each load and each bound the checkpoint is read, and
the processes allocate and free half as much memory again as they will read. Before cold ones the checkpoint is then
evicted from the page cache: see `memory.py`. Cold loads are also compared with the disk: `dd` of the same files, one
after the other, also cold. Seconds are from barrier to barrier around `load_checkpoint`. Processor seconds are those of
all ranks, per gigabyte of their state. Memory is the peak of a rank beyond its memory before the load plus the loaded
state, or the loaded state if that is more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import megatron_on_devices  # noqa: E402 - the path is set above
import torch  # noqa: E402
from command_line import parser_of  # noqa: E402 - command_line.py in this folder
from megatron_on_cpu import launch, toy_jobs  # noqa: E402
from memory import bytes_of, forget, fresh, remember, touch  # noqa: E402 - memory.py in this folder

from mcore_ckpt_ext.selftest.machine import device_name, versions  # noqa: E402

PLUGIN = Path(__file__).with_name("loading_rank.py")
BLOCK = 16 << 20
CPU, CPU_RANKS = "cpu", 8
# Memory to allocate before a load, relative to the checkpoint: buffers to read into, and working memory.
TOUCHED = 1.5
FULLY_RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]


@dataclass
class Way:
    """A way of loading: the folder, the layout, the options, and the results."""

    folder: str
    tensor: int
    pipeline: int
    environment: dict[str, str]
    cold: bool = False
    runs: list[list[dict[str, float]]] = field(default_factory=list)
    bounds: list[tuple[float, float]] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)


WAYS = {
    "stock": Way("saved", 1, 4, {"MCORE_CKPT_EXT": "0"}),
    "fast": Way("saved", 1, 4, {"MCORE_CKPT_EXT_LOAD": "fast"}),
    "once": Way("saved", 1, 4, {"MCORE_CKPT_EXT_LOAD": "fast", "MCORE_CKPT_EXT_READ_ONCE": "1"}),
    "moved": Way("saved", 2, 2, {"MCORE_CKPT_EXT_LOAD": "auto"}),
    "twin": Way("twin", 2, 2, {"MCORE_CKPT_EXT": "0"}),
    "cold stock": Way("saved", 1, 4, {"MCORE_CKPT_EXT": "0"}, cold=True),
    "cold fast": Way("saved", 1, 4, {"MCORE_CKPT_EXT_LOAD": "fast"}, cold=True),
    "cold moved": Way("saved", 2, 2, {"MCORE_CKPT_EXT_LOAD": "auto"}, cold=True),
}


def ways_on(device: str, ranks: int) -> dict[str, Way]:
    """Return the ways of loading on a kind of device."""
    if device == CPU:
        return WAYS
    return {
        "stock": Way("saved on devices", 1, ranks, WAYS["stock"].environment),
        "fast": Way("saved on devices", 1, ranks, WAYS["fast"].environment),
        "moved": Way("saved", 1, 1, WAYS["moved"].environment),
    }


def job(
    options: argparse.Namespace, way: Way, name: str, *, saves: list[str] | None = None, device: str = ""
) -> list[dict[str, float]]:
    """Run one job on a device, by default that of the options, and return the measurements of its ranks."""
    on_cpu = (device or options.device) == CPU
    ranks = options.ranks if on_cpu == (options.device == CPU) else CPU_RANKS
    run_folder, report = options.folder / way.folder, options.folder / "reports" / name
    report.mkdir(parents=True, exist_ok=True)
    size = ["--num-layers", str(options.layers), "--hidden-size", str(options.hidden)]
    if options.device != CPU:  # samples of mock data contain whole numbers up to 4096
        size += ["--vocab-size", "8191"]
    arguments = toy_jobs.tiny_gpt(
        way.tensor, way.pipeline, iterations=2, save=None if saves is None else run_folder, save_interval=1,
        load=run_folder if saves is None else None, devices=toy_jobs.CPU if on_cpu else toy_jobs.GPU,
        more=[*size, "--exit-interval", "1", *(saves or [])],
    )  # fmt: skip
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "scripts"), str(PLUGIN.parent)])
    share = str(int(TOUCHED * bytes_of(run_folder) / ranks))
    own = {"LOADING_REPORT": str(report), "LOADING_BYTES": share, "PYTHONPATH": paths}
    environment = {**way.environment, **own}
    plugins = [PLUGIN] if saves is None else []
    megatron: Path | None = options.megatron
    script = launch.TRAIN_GPT if megatron is None else megatron / "pretrain_gpt.py"
    environment["LOADING_FOLDER"] = str(run_folder)
    if way.cold:
        environment["LOADING_COLD"] = "1"
    if on_cpu:
        result = launch.run(
            ranks, script, arguments, timeout=900, megatron=megatron, environment=environment, plugin_files=plugins
        )
    else:
        result = megatron_on_devices.run(
            ranks, script, arguments, timeout=300, environment=environment, plugin_files=plugins
        )
    found = [json.loads(path.read_text()) for path in sorted(report.glob("*.json"))]
    if result.returncode or (saves is None and len(found) != ranks):
        raise SystemExit(result.output[-4000:])
    return found


def bound(folder: Path, counts: list[float], cold: bool) -> tuple[float, float]:
    """Return seconds and processor seconds of as many processes that only read as many bytes."""
    remember(folder)
    barrier = multiprocessing.Barrier(len(counts) + 1)
    queue: multiprocessing.Queue[float] = multiprocessing.Queue()
    files = sorted(path for path in folder.rglob("*.distcp"))
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    readers = [
        multiprocessing.Process(target=read_plainly, args=(files, int(start), int(count), barrier, queue))
        for start, count in zip(starts, counts, strict=True)
    ]
    for reader in readers:
        reader.start()
    barrier.wait()
    if cold:
        forget(folder)
    barrier.wait()
    begun = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - begun
    busy = sum(queue.get() for _ in readers)
    for reader in readers:
        reader.join()
    return seconds, busy


def disk(folder: Path) -> float:
    """Return the seconds that `dd` takes to read each file from disk once, one after the other."""
    remember(folder)
    forget(folder)
    begun = time.perf_counter()
    for file in sorted(folder.rglob("*.distcp")):
        subprocess.run(["dd", f"if={file}", "of=/dev/null", f"bs={BLOCK}", "status=none"], check=True)
    return time.perf_counter() - begun


def read_plainly(
    files: list[Path], start: int, count: int, barrier: Barrier, queue: multiprocessing.Queue[float]
) -> None:
    """Read `count` bytes from byte `start` of the files, repeating them if necessary, into new memory."""
    sizes = [file.stat().st_size for file in files]
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    start %= sum(sizes)
    number = 0
    while start >= sizes[number]:
        start, number = start - sizes[number], number + 1
    touch(int(TOUCHED * count))
    barrier.wait()  # after this, the page cache may be evicted
    barrier.wait()
    busy = time.process_time()
    memory = memoryview(bytearray(0)) if not count else memoryview(fresh(count))
    done = 0
    while done < count:
        wanted = min(BLOCK, count - done, sizes[number] - start)
        done += os.preadv(descriptors[number], [memory[done : done + wanted]], start)
        start += wanted
        if start >= sizes[number]:
            start, number = 0, (number + 1) % len(files)
    busy = time.process_time() - busy
    barrier.wait()
    queue.put(busy)


def main() -> None:
    """Save, load in turn, print the table."""
    parser = parser_of(__doc__, runs=5, layers=24, hidden=1024)
    parser.add_argument("--ranks", type=int, help=f"default: {CPU_RANKS}, or one for each device")
    parser.add_argument("--device", default=CPU, help="kind of device of the ranks, such as cuda (default: cpu)")
    parser.add_argument("--megatron", type=Path)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["stock", "fast", "moved"])
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise every rank compiles Megatron's modules during a load
    options.ranks = options.ranks or (CPU_RANKS if options.device == CPU else torch.accelerator.device_count())
    known = ways_on(options.device, options.ranks)
    ways = {name: known[name] for name in options.ways}
    for name in {way.folder for way in ways.values()}:
        if not (options.folder / name).exists():
            more = FULLY_RESHARDABLE if name == "twin" else []
            stages, device = (options.ranks, options.device) if name == "saved on devices" else (4, CPU)
            job(options, Way(name, 1, stages, {"MCORE_CKPT_EXT": "0"}), f"saving {name}", saves=more, device=device)
        print(f"{name}: {bytes_of(options.folder / name) / 1e9:.2f} GB", flush=True)
    for number in range(options.runs):
        for name, way in ways.items():
            ranks = job(options, way, f"{name}-{number}")
            way.runs.append(ranks)
            counts = [min(rank["held"], rank["asked"]) for rank in ranks]
            way.bounds.append(bound(options.folder / way.folder, counts, way.cold))
            if way.cold:
                way.disk.append(disk(options.folder / way.folder))
    print("| way | seconds | bound | x bound | processor s/GB | bound | GB | GB asked | peak MiB | device MiB | dd |")
    for name, way in ways.items():
        seconds = statistics.median(run[0]["seconds"] for run in way.runs)
        least = statistics.median(seconds for seconds, _ in way.bounds)
        held, asked, busy = (
            statistics.median(sum(rank[key] for rank in run) for run in way.runs)
            for key in ("held", "asked", "processor")
        )
        least_busy = statistics.median(busy for _, busy in way.bounds)
        peak = max(rank["peak"] - max(rank["before"], rank["after"]) for run in way.runs for rank in run)
        on_device = max(rank["on_device"] for run in way.runs for rank in run)
        print(
            f"| {name} | {seconds:.2f} | {least:.2f} | {seconds / least:.2f} "
            f"| {1e9 * busy / held:.2f} | {1e9 * least_busy / held:.2f} "
            f"| {held / 1e9:.2f} | {asked / 1e9:.2f} | {int(peak) >> 20} | {int(on_device) >> 20} "
            f"| {f'{statistics.median(way.disk):.2f}' if way.disk else ''} |"
        )
    if options.device != CPU:
        print(f"{options.ranks} x {device_name()}; {', '.join(map(' '.join, versions().items()))}")
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
