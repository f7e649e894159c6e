"""Measures whole commands as a user runs them, from prompt to prompt, against lower bounds.

    python benchmarks/commands.py FOLDER [--runs 3] [--layers 16 --hidden 1024] [--interrupted] [--loads]

Makes a checkpoint of 4.3 GB in FOLDER, and runs in turn `convert` to three formats, `verify` and `diff`, warm (the
input is in the page cache) and cold (the input was evicted from the page cache). Each command is followed by its
references, with the same state of the page cache. For a conversion they copy as many bytes of the source as it writes:
`sendfile` and `cp` with a flush of each file, and direct I/O with two threads; the bound is the fastest of them. For
`verify` and `diff` they read the same bytes with two threads, through the page cache and, if it is cold, by direct I/O.
`diff` compares the checkpoint with the result of `convert --to torch_dist`. Modules are compiled beforehand, as after
an installation. Seconds include starting Python and importing torch, which the first row shows alone; processor seconds
are user and system time of the process; peak memory is its resident set, including mapped libraries.

`--interrupted` also kills a conversion in the middle and continues it with `--resume`. `--loads` also runs
`loading.py` (a job with real Megatron: stock, `fast` and another layout).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from command_line import parser_of
from direct_io import machine  # direct_io.py in this folder
from memory import bytes_of, files_of, forget, remember

_HERE = Path(__file__).parent
_COMMAND = [sys.executable, "-m", "mcore_ckpt_ext"]
IMPORTS = "import torch"
# As in the commands: without the garbage collector, and without the interpreter's cleanup at the end.
_IMPORT_ALONE = "import gc, os; gc.disable(); import torch; os._exit(0)"
_TARGETS = ("torch_dist", "legacy", "hf")
SIZES = {"layers": 16, "hidden": 1024, "feed-forward": 3584, "vocabulary": 32000}
_SENDFILE = f"import sys; sys.path.insert(0, {str(_HERE)!r}); import stream; stream.copy(*sys.argv[1:])"
_DIRECT = f"import sys; sys.path.insert(0, {str(_HERE)!r}); import direct_io; direct_io.{{}}(*sys.argv[1:])"
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
READY: dict[str, Callable[[Path], None]] = {"warm": remember, "cold": forget}
"""Functions that set the state of the page cache for a folder before a run."""


@dataclass
class Measured:
    """Runs of one command.

    Attributes:
        seconds: wall-clock time of each run.
        busy: processor seconds of each run, the kernel's included.
        memory: peak resident memory of all runs, in MiB.
    """

    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    memory: int = 0

    def run(self, command: list[str], environment: dict[str, str]) -> None:
        """Run the command once."""
        begun = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
        messages = process.stderr.read() if process.stderr else ""
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{shlex.join(command)}\n{messages[-2000:]}")
        self.seconds.append(time.monotonic() - begun)
        self.busy.append(used.ru_utime + used.ru_stime)
        self.memory = max(self.memory, used.ru_maxrss >> 10)


Results = dict[tuple[str, str], Measured]
"""Results by command and state of the page cache; a command's references are named `COMMAND: REFERENCE`."""


class Benchmark:
    """Runs the commands in a folder that contains the checkpoint `source`."""

    def __init__(self, folder: Path, vocabulary: int, *, interrupted: bool) -> None:
        self.results: Results = {}
        self._interrupted = interrupted
        self._options = {"hf": ["--vocab-size", str(vocabulary)]}
        self._folder, self._source = folder, folder / "source"
        # Python compiles modules unless something prevents it, and pip compiles them on installation.
        self._environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        Measured().run([*_COMMAND, "inspect", str(self._source)], self._environment)

    def run_all(self, state: str) -> None:
        """Run each command once, followed by its references."""
        folder, source = self._folder, self._source
        self._run(IMPORTS, state, [sys.executable, "-c", _IMPORT_ALONE], ())
        for target in _TARGETS[1:]:
            self._convert(target, state)
            self._run_copies(target, state)
        self._convert("torch_dist", state)
        for name, read in (("verify", [source]), ("diff", [source, folder / "torch_dist"])):
            paths = [str(path) for path in read]
            self._run(name, state, [*_COMMAND, name, *paths], read)
            self._run(f"{name}: reading", state, [sys.executable, "-c", _READ, *paths], read)
            if state == "cold":
                self._run(f"{name}: direct I/O", state, [sys.executable, "-c", _DIRECT.format("read"), *paths], read)
        self._run_copies("torch_dist", state)
        if self._interrupted:
            self._run_interrupted(state)

    def _convert(self, target: str, state: str) -> None:
        source, out = self._source, self._folder / target
        command = [*_COMMAND, "convert", str(source), str(out), "--to", target, *self._options.get(target, [])]
        self._run(f"convert --to {target}", state, command, [source])

    def _run_interrupted(self, state: str) -> None:
        """Kill a conversion after half of the time that one has taken, and continue it."""
        out = self._folder / "interrupted"
        command = [*_COMMAND, "convert", str(self._source), str(out), "--to", "torch_dist"]
        READY[state](self._source)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=self._environment) as process:
            time.sleep(self.results["convert --to torch_dist", state].seconds[-1] / 2)
            process.kill()
        self._run("convert --resume, killed after half of it", state, [*command, "--resume"], [self._source])
        shutil.rmtree(out)

    def _run_copies(self, target: str, state: str) -> None:
        """Delete what a conversion has written, and copy as many bytes in other ways."""
        written, copy = self._folder / target, self._folder / "copy"
        size = bytes_of(written)
        shutil.rmtree(written)
        source = _of_size(self._source, size, self._folder / "part")
        flushed = (
            f"cp -r {shlex.quote(str(source))} {shlex.quote(str(copy))} && {_FLUSH.format(shlex.quote(str(copy)))}"
        )
        for reference, command in (
            ("sendfile", [sys.executable, "-c", _SENDFILE, str(source), str(copy)]),
            ("cp", ["sh", "-c", flushed]),
            ("direct I/O", [sys.executable, "-c", _DIRECT.format("copy"), str(source), str(copy)]),
        ):
            self._run(f"convert --to {target}: {reference}", state, command, [source])
            shutil.rmtree(copy)
        if source != self._source:
            shutil.rmtree(source)

    def _run(self, name: str, state: str, command: list[str], read: Iterable[Path]) -> None:
        for path in read:
            READY[state](path)
        self.results.setdefault((name, state), Measured()).run(command, self._environment)


def _of_size(source: Path, size: int, part: Path) -> Path:
    """Return a folder of about `size` bytes: the source if it is not much larger, or a new one with its first bytes."""
    if size > 0.9 * bytes_of(source):
        return source
    part.mkdir()
    for path in files_of(source):
        with path.open("rb") as file, (part / path.name).open("wb") as copy:
            while block := file.read(min(1 << 24, size)):
                size -= copy.write(block)
    return part


def table(results: Results) -> Iterator[str]:
    """Yield the lines of a table: a row for each command, and for each of its references."""
    yield "| command | cache | seconds (least to most) | processor s | peak MiB | seconds, x | processor s, x |"
    yield "|---|---|---|---|---|---|---|"
    for (name, state), measured in results.items():
        references = {
            other.partition(": ")[2]: found
            for (other, cache), found in results.items()
            if cache == state and other.startswith(f"{name}: ")
        }
        imports = results[IMPORTS, state]
        cells = [
            f"{median(measured.seconds):.2f} ({min(measured.seconds):.1f} to {max(measured.seconds):.1f})",
            f"{median(measured.busy):.2f}",
            str(measured.memory),
            _ratios(measured.seconds, imports.seconds, {short: found.seconds for short, found in references.items()}),
            _ratios(measured.busy, imports.busy, {short: found.busy for short, found in references.items()}),
        ]
        yield f"| {' | '.join([name, state, *cells])} |"


def _ratios(own: list[float], imports: list[float], references: dict[str, list[float]]) -> str:
    """Format ratios of medians: of the whole command, and in parentheses without the time of imports."""
    beyond = median(own) - median(imports)
    return "; ".join(
        f"{name} {median(own) / median(found):.2f} ({beyond / median(found):.2f})" for name, found in references.items()
    )


def main() -> None:
    """Make the checkpoint, measure in turn, print the table."""
    parser = parser_of(__doc__, runs=3)
    parser.add_argument("--states", nargs="+", choices=READY, default=list(READY), help="of the page cache")
    parser.add_argument("--interrupted", action="store_true", help="also kill and continue a conversion")
    parser.add_argument("--loads", action="store_true", help="also run loading.py (needs megatron-core)")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    folder: Path = options.folder
    if not (folder / "source").exists():
        sizes = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in SIZES]
        # In a separate process, because a child's peak memory starts at that of its parent.
        subprocess.run([sys.executable, str(_HERE / "synthetic.py"), str(folder / "source"), *sizes], check=True)
    print(machine(folder), flush=True)
    benchmark = Benchmark(folder, options.vocabulary, interrupted=options.interrupted)
    before = os.getloadavg()[0]
    for _ in range(options.runs):
        for state in options.states:
            benchmark.run_all(state)
    print("\n".join(table(benchmark.results)))
    print(f"{options.runs} runs, load of the machine {before:.1f} to {os.getloadavg()[0]:.1f}", flush=True)
    if options.loads:
        command = [sys.executable, str(_HERE / "loading.py"), str(folder / "loads"), "--runs", str(options.runs)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
