"""The demonstration: genuine Megatron-LM resumes its checkpoint under other layouts, on CPU ranks.

    python3 scripts/demo.py [FOLDER]

Makes its own environment in `.venv` (about two minutes and 5 GB on a fresh machine); results go to FOLDER (`demo`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from environment import REPOSITORY, SetupError, prepared


def main() -> int:
    """Install, then hand over to the environment's own Python."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo").resolve()
    print("[1/6] installing torch and megatron-core from PyPI into .venv (about two minutes on a fresh machine) ...")
    sys.stdout.flush()
    started = time.monotonic()
    try:
        python = prepared(REPOSITORY / ".venv", "demo", REPOSITORY / ".venv-install.log")
    except SetupError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"      done in {time.monotonic() - started:.0f} s", flush=True)
    script = REPOSITORY / "scripts" / "resume_demonstration.py"
    return subprocess.run([python, str(script), str(folder)], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
