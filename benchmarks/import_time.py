"""Measures how much longer ``import torch`` takes with this package installed.

Needs this package installed. Three kinds of new interpreters are run in turn, so that a busy machine slows all
of them: torch alone (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), torch with the hooks, torch with the hooks disabled
(``MCORE_CKPT_EXT=0``). Run: ``python benchmarks/import_time.py [ROUNDS]``.
"""

import argparse
import os
import statistics
import subprocess
import sys

CODE = "import time; start = time.perf_counter(); import torch; print(time.perf_counter() - start)"
KINDS = {
    "import torch, no autoload": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    "import torch, hooks on": {},
    "import torch, MCORE_CKPT_EXT=0": {"MCORE_CKPT_EXT": "0"},
}
OURS = (
    "import torch, time; start = time.perf_counter();"
    "import mcore_ckpt_ext_autoload as a; a.register(); print(time.perf_counter() - start)"
)


def seconds(code: str, environment: dict[str, str]) -> float:
    """Run code in a new interpreter and return the number that it prints."""
    clean = {k: v for k, v in os.environ.items() if k not in {"MCORE_CKPT_EXT", "TORCH_DEVICE_BACKEND_AUTOLOAD"}}
    finished = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, text=True, check=True
    )
    return float(finished.stdout)


def main() -> None:
    """Print the medians, their ratio to torch alone, and the cost of this package."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rounds", nargs="?", type=int, default=9)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, environment in KINDS.items():
            times[kind].append(seconds(CODE, environment))
    alone = statistics.median(times["import torch, no autoload"])
    for kind, measured in times.items():
        median = statistics.median(measured)
        spread = max(measured) - min(measured)
        print(f"{kind:32} median {median:.3f} s, spread {spread:.3f} s, ratio {median / alone:.3f}")
    own = [seconds(OURS, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}) for _ in range(rounds)]
    print(f"{'import and register, after torch':32} median {statistics.median(own) * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
