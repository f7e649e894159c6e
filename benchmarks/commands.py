"""What a user gets: whole commands, from the shell's prompt to the next, nothing prepared, each beside its bound.

    python benchmarks/commands.py FOLDER [--runs 3] [--layers 16 --hidden 1024] [--loads]

Makes a checkpoint of 4.3 GB below FOLDER, and runs in turn `convert` to three formats, `verify` and `diff`, warm (the
page cache as the previous command left it) and cold (the page cache has forgotten the source). Between them run the
bounds: for a conversion `sendfile` of as many bytes as it writes, each file flushed, and the peer `cp`, flushed; for
`verify` the reading of all bytes by two threads, for `diff` of both folders'. Seconds include the start of Python and
torch, which the first row shows alone; processor seconds are those of the process and of the system on its behalf; peak
memory is what the process holds, with the libraries that it has mapped. `--loads` also runs `loading.py` (a job of
genuine Megatron: stock, `fast`, another layout).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from memory import forget  # beside this file

_IMPORTS = "import torch"
_HERE = Path(__file__).parent
_COMMAND = [sys.executable, "-m", "mcore_ckpt_ext"]
_TARGETS: dict[str, list[str]] = {"torch_dist": [], "legacy": [], "hf": ["--vocab-size", "32000"]}
SIZES = {"layers": 16, "hidden": 1024, "feed-forward": 3584, "vocabulary": 32000}
_FLUSH = "find {} -type f -exec sync {{}} +"
_READ = """
import os, sys, threading
from pathlib import Path
files = [path for folder in sys.argv[1:] for path in sorted(Path(folder).rglob("*")) if path.is_file()]
def read(part):
    block = memoryview(bytearray(1 << 19))
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        for start in range(part << 24, path.stat().st_size, 2 << 24):
            for at in range(start, start + (1 << 24), len(block)):
                os.preadv(descriptor, [block], at)
        os.close(descriptor)
threads = [threading.Thread(target=read, args=(part,)) for part in (0, 1)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@dataclass
class Measured:
    """A command, and what came of each of its runs."""

    command: list[str]
    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    memory: int = 0

    def run(self) -> None:
        """Run it once."""
        begun = time.monotonic()
        process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        said = process.stderr.read() if process.stderr else ""
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{shlex.join(self.command)}\n{said[-2000:]}")
        self.seconds.append(time.monotonic() - begun)
        self.busy.append(used.ru_utime + used.ru_stime)
        self.memory = max(self.memory, used.ru_maxrss >> 10)


def copies(what: str, source: Path, copy: Path) -> Iterator[tuple[str, Measured]]:
    """The bound and the peer of a conversion that wrote `source`."""
    program = f"import sys; sys.path.insert(0, {str(_HERE)!r}); import stream; stream.copy(*sys.argv[1:])"
    yield f"{what}: sendfile, flushed", Measured([sys.executable, "-c", program, str(source), str(copy)])
    shell = f"cp -r {shlex.quote(str(source))} {shlex.quote(str(copy))} && {_FLUSH.format(shlex.quote(str(copy)))}"
    yield f"{what}: cp, flushed", Measured(["sh", "-c", shell])


def run_all(folder: Path, cold: bool, found: dict[str, Measured]) -> None:
    """Each command once, with its bounds."""
    source, out, copy = folder / "source", folder / "out", folder / "copy"

    def once(name: str, measured: Measured) -> None:
        if cold:
            forget(source)
        found.setdefault(name, measured).run()

    once(_IMPORTS, Measured([sys.executable, "-c", "import torch"]))
    for target, more in _TARGETS.items():
        what = f"convert --to {target}"
        once(what, Measured([*_COMMAND, "convert", str(source), str(out), "--to", target, *more]))
        for name, bound in copies(what, out, copy):
            if cold:
                forget(out)
            found.setdefault(name, bound).run()
            shutil.rmtree(copy)
        shutil.rmtree(out)
    once("verify", Measured([*_COMMAND, "verify", str(source)]))
    once("verify: reading", Measured([sys.executable, "-c", _READ, str(source)]))
    once("diff", Measured([*_COMMAND, "diff", str(source), str(source)]))
    once("diff: reading both", Measured([sys.executable, "-c", _READ, str(source), str(source)]))


def print_table(found: dict[str, Measured]) -> None:
    """A row for each command and each bound; ratios of the whole command, and of what it takes beyond its imports."""
    print("| command | seconds | least to most | processor s | peak MiB | x its bound (beyond the imports) |")
    imports = statistics.median(found[_IMPORTS].seconds)
    for name, measured in found.items():
        seconds, busy = statistics.median(measured.seconds), statistics.median(measured.busy)
        ratios = []
        for bound in (other for other in found if other.startswith(f"{name}: ")):
            least = statistics.median(found[bound].seconds)
            ratios.append(f"{seconds / least:.2f} ({(seconds - imports) / least:.2f}) {bound.partition(': ')[2]}")
        spread = f"{min(measured.seconds):.2f} to {max(measured.seconds):.2f}"
        print(f"| {name} | {seconds:.2f} | {spread} | {busy:.2f} | {measured.memory} | {'; '.join(ratios)} |")


def main() -> None:
    """Make the checkpoint, measure in turn, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--loads", action="store_true", help="also run loading.py (needs megatron-core)")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    folder: Path = options.folder
    if not (folder / "source").exists():
        sizes = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in SIZES]
        # In a process of its own: a child's peak memory begins with what its parent holds.
        subprocess.run([sys.executable, str(_HERE / "synthetic.py"), str(folder / "source"), *sizes], check=True)
    found: dict[bool, dict[str, Measured]] = {False: {}, True: {}}
    for _ in range(options.runs):
        for cold, measured in found.items():
            run_all(folder, cold, measured)
    for cold, measured in found.items():
        print("cold" if cold else "warm")
        print_table(measured)
    print(f"load of the machine: {os.getloadavg()[0]:.1f}", flush=True)
    if options.loads:
        command = [sys.executable, str(_HERE / "loading.py"), str(folder / "loads"), "--runs", str(options.runs)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
