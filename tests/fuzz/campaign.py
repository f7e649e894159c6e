"""The coverage-guided campaign: atheris varies a target's decisions to reach new code.

    python -m tests.fuzz.campaign --inputs 100000 [--only TARGET...]

Each target runs in its own process, which libFuzzer ends if an input takes more than a minute or the process more than
2 GiB. Resource limits of the system also bound its address space, to that size beyond what its imports use, and its
processor time. Any exception but a CheckpointError, and any attempt to execute something, ends it.
`--target NAME --reproduce FILE` runs one input again. Needs `pip install atheris`.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

import atheris

SECONDS, MEMORY_MIB, INPUT_BYTES = 60, 2048, 512
# Inputs of one process: what atheris itself keeps of every input would count as memory of the reader.
ROUND, ROUND_SECONDS = 4000, 3600
# Share of the inputs: the unpickler alone is a hundred times faster than a whole checkpoint.
SHARES = {
    "pickle": 0.82, "archive": 0.02, "index": 0.04, "common": 0.02, "legacy": 0.02, "zarr": 0.02, "canonical": 0.025,
    "config": 0.025, "sidecar": 0.01,
}  # fmt: skip


class FuzzedChoices:
    """Decisions out of the fuzzer's bytes; when they are used up, the lowest."""

    def __init__(self, data: bytes) -> None:
        self._provider = atheris.FuzzedDataProvider(data)

    def between(self, low: int, high: int) -> int:
        """See `Choices`."""
        return int(self._provider.ConsumeIntInRange(low, high))


def fuzz(name: str, folder: Path, arguments: list[str]) -> None:
    """Fuzz one target in this process, scratch files below `folder`; libFuzzer's `arguments`. Does not return."""
    with atheris.instrument_imports(include=["mcore_ckpt_ext"]):
        from tests.fuzz.targets import target, watch_execution
    import torch

    torch.set_num_threads(1)
    subject = target(name, folder)
    limit()
    watch_execution()

    def one(data: bytes) -> None:
        subject.run(FuzzedChoices(data))

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def limit() -> None:
    """Let the system hold this process to what an input may take, whatever libFuzzer sees of it."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    space = pages * resource.getpagesize() + (MEMORY_MIB << 20)
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    resource.setrlimit(resource.RLIMIT_CPU, (ROUND_SECONDS, ROUND_SECONDS))


def campaign(inputs: int, seed: int, names: Collection[str]) -> int:
    """These targets, one after the other; 1 as soon as one found something, else 0."""
    for name in names:
        share, begun, done, peak = SHARES[name], time.monotonic(), 0, 0
        with tempfile.TemporaryDirectory() as folder:
            corpus = _corpus(Path(folder))
            while done < inputs * share:
                options = [
                    f"-runs={min(ROUND, math.ceil(inputs * share) - done)}", f"-seed={seed + done}",
                    f"-timeout={SECONDS}", f"-rss_limit_mb={MEMORY_MIB}", f"-max_len={INPUT_BYTES}",
                    "-len_control=0", "-print_final_stats=1", str(corpus),
                ]  # fmt: skip
                result = _in_a_process(name, Path(folder), options)
                if result.returncode:
                    print(result.stderr[-6000:])
                    print(f"{name}: found something; the input lies in this folder, see --reproduce")
                    return 1
                found = dict(line[6:].split(":") for line in result.stderr.splitlines() if line.startswith("stat::"))
                done += int(found["number_of_executed_units"])
                peak = max(peak, int(found["peak_rss_mb"]))
        print(f"{name}: {done:,} inputs, {time.monotonic() - begun:.0f} s, peak {peak:,} MiB", flush=True)
    return 0


def _corpus(folder: Path) -> Path:
    """Long inputs from the start: an empty one decides everything in the same way."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(8):
        content = bytes((number * 37 + position * 101) % 256 for position in range(INPUT_BYTES))
        (corpus / str(number)).write_bytes(content)
    return corpus


def _in_a_process(name: str, folder: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz.campaign", "--target", name, "--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--target", choices=SHARES)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--reproduce", type=Path)
    options, rest = parser.parse_known_args()
    if options.reproduce:
        with tempfile.TemporaryDirectory() as folder:
            result = _in_a_process(options.target, Path(folder), [str(options.reproduce)])
        print(result.stderr)
        return result.returncode
    if options.target:
        fuzz(options.target, options.folder, rest)
    return campaign(options.inputs, options.seed, options.only)


if __name__ == "__main__":
    sys.exit(main())
