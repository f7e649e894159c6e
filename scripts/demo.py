"""Demonstrates how genuine Megatron-LM resumes its checkpoint under other layouts, on CPU ranks.

    python3 scripts/demo.py [FOLDER] [--megatron CHECKOUT] [--elastic]

It creates an environment in `.venv` (about two minutes and 5 GB on a new machine), and writes results to FOLDER
(default: `demo`). With --megatron, it runs the `pretrain_gpt.py` of your checkout instead of the release on PyPI. With
--elastic, it trains through the death of a node and its return instead.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from environment import REPOSITORY, SetupError, prepared
from how_far import installing

# Files of a checkout: the script, and a file by which Megatron-LM is recognized.
_NEEDED = ("pretrain_gpt.py", "megatron/core/package_info.py")
_MARK = ".made_by_demo"


def main() -> int:
    """Install, then continue with the environment's own Python."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("demo"), help="for the results (default: demo)")
    parser.add_argument("--megatron", type=Path, metavar="CHECKOUT", help="a checkout of Megatron-LM, 0.16 or later")
    parser.add_argument(
        "--elastic", action="store_true", help="train through the death of a node and its return instead"
    )
    arguments = parser.parse_args()
    if arguments.megatron is not None:
        missing = [name for name in _NEEDED if not (arguments.megatron / name).is_file()]
        if missing:
            parser.error(f"{arguments.megatron} is no checkout of Megatron-LM: it has no {' and no '.join(missing)}")
    if not make_empty(arguments.folder):
        parser.error(f"{arguments.folder} contains files that this program has not made: name another folder")
    parts, program = (3, "elastic_demonstration.py") if arguments.elastic else (6, "resume_demonstration.py")
    print(f"[1/{parts}] installing torch and megatron-core from PyPI into .venv ", end="")
    print("(about two minutes on a fresh machine) ...", flush=True)
    started = time.monotonic()
    log = REPOSITORY / ".venv-install.log"
    try:
        with installing(log):
            python = prepared(REPOSITORY / ".venv", "demo", log)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"      done in {time.monotonic() - started:.0f} s", flush=True)
    command = [python, REPOSITORY / "scripts" / program, arguments.folder.resolve()]
    if arguments.megatron is not None:
        command.append(arguments.megatron.resolve())
    return subprocess.run(command, check=False).returncode


def make_empty(folder: Path) -> bool:
    """Make the folder, without the results of an earlier run; return False if it contains anything else."""
    is_marked = (folder / _MARK).is_file()
    if folder.exists() and not is_marked and (not folder.is_dir() or any(folder.iterdir())):
        return False
    if is_marked:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()
    return True


if __name__ == "__main__":
    raise SystemExit(main())
