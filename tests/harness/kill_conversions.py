"""Kills conversions at random moments, and checks the remains: argv is source, folder, target format, number.

A separate program, which imports once and forks each conversion, so that the moments are within the conversion and not
in the imports. Prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a forked process does not inherit the threads of a pool

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.storage.file_digests import FILE_NAME
from mcore_ckpt_ext.targets import TARGETS

SOURCE, FOLDER, TO, COUNT = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])


def start(destination: Path, resume: bool) -> int:
    """Fork a conversion, with small blocks, so that there are many moments to kill it at."""
    process = os.fork()
    if process:
        return process
    try:
        mcore_ckpt_ext.convert(SOURCE, destination, TARGETS[TO](), resume=resume, memory_limit=1, workers=2)
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        os._exit(1)
    os._exit(0)


def finish(process: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def digest(folder: Path, links: bool = True) -> str:
    """Return a digest of all files; without `links`, apart from what is recorded when all of them can be read."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            if path.name == FILE_NAME and not links:
                with suppress(ValueError):  # only begun
                    content = json.dumps({**json.loads(content), "checksums": None}).encode()
            found.update(str(path.relative_to(folder)).encode() + content)
    return found.hexdigest()


def passes_for_complete(folder: Path) -> bool:
    try:
        mcore_ckpt_ext.open_checkpoint(folder)
    except CheckpointError:
        return False
    return True


def main() -> None:
    generator = random.Random(TO)
    # Work that a process does only once is done before the forks, so that the moments are within conversions.
    mcore_ckpt_ext.convert(SOURCE, FOLDER / "warm", TARGETS[TO](), memory_limit=1, workers=2)
    shutil.rmtree(FOLDER / "warm")
    begun = time.monotonic()
    assert finish(start(FOLDER / "reference", resume=False))
    duration = time.monotonic() - begun
    expected = digest(FOLDER / "reference")
    readable = digest(FOLDER / "reference", links=False)
    report = {"killed": 0, "published": 0, "half published": 0, "partial passes": 0, "resumed": 0, "different": 0}
    while report["killed"] < COUNT:
        destination = FOLDER / f"out{sum(report.values())}"
        process = start(destination, resume=False)
        time.sleep(generator.uniform(0, duration))
        os.kill(process, signal.SIGKILL)
        if finish(process):
            shutil.rmtree(destination)  # it was faster than the signal
            continue
        report["killed"] += 1
        if destination.exists():
            report["published"] += 1
            report["half published"] += digest(destination) != expected
            shutil.rmtree(destination)
            continue
        partial = [path for path in FOLDER.iterdir() if path.name.startswith(f"{destination.name}.partial-")]
        # Opening the unfinished folder must be refused until its content is complete.
        for path in partial:
            done = (path / "content").exists() and digest(path / "content", links=False) == readable
            report["partial passes"] += not done and passes_for_complete(path / "content")
        assert finish(start(destination, resume=True))
        report["resumed"] += 1
        report["different"] += digest(destination) != expected
        shutil.rmtree(destination)
    report["left behind"] = len([path for path in FOLDER.iterdir() if path.name != "reference"])
    sys.stdout.write(json.dumps(report) + "\n")


main()
