"""Measures time and peak memory of the strict state_dict against ColossalAI's own, on CPU ranks with gloo.

Needs an environment with ColossalAI 0.5.0 (scripts/run_tests.py makes `.venv-colossalai`). The model is a tied GPT of
some 80 million parameters on 2 ranks; the two are run in turn in one run, so that a busy machine slows both. Memory is
the growth of the peak resident set in one call, in a new pair of ranks for each. For a load, the fraction of the
digests is reported, by which the ranks check that all of them received the same state dict.

Run: ``python benchmarks/zero_state_dict.py [ROUNDS]``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from colossalai_on_cpu import ranks, redirect  # noqa: E402 - found by the line above

MIB = 1 << 20
WIDTH, LAYERS, VOCABULARY = 1024, 40, 38_000
CHUNK = 8 * MIB
LARGEST_CHUNK = max(CHUNK, VOCABULARY * WIDTH) * 4 / MIB
_M_MMAP_THRESHOLD = -3


def wrapped_model() -> Any:
    """Return the model in a GeminiDDP with chunks of 32 MiB in fp32; the embedding has a chunk of its own."""
    import torch
    import torch.distributed as dist
    from colossalai.zero import GeminiDDP
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.head.weight = self.wte.weight

    chunks = {dist.get_world_size(): {"chunk_size": CHUNK, "keep_gathered": False}}
    return GeminiDDP(
        Model(),
        chunks,
        chunk_init_device=torch.device("cpu"),
        mixed_precision=torch.bfloat16,
        placement_policy="static",
    )


def calls() -> dict[str, Callable[[Any], Any]]:
    """Return the functions to compare."""
    from mcore_ckpt_ext.zero_strict_state_dict import iter_zero_strict_state_dict, zero_strict_state_dict

    return {
        "ColossalAI, bf16": lambda model: model.state_dict(),
        'strict, "compute" (bf16)': lambda model: zero_strict_state_dict(model, dtype="compute"),
        'strict, "master" (fp32)': lambda model: zero_strict_state_dict(model),
        "strict, in shards of 64 MiB": lambda model: [None for _ in iter_zero_strict_state_dict(model, 64 * MIB)],
    }


def seconds(rounds: int) -> dict[str, list[float]]:
    """Return the time of each call in each round, in one world; the first round is not counted."""
    import torch.distributed as dist

    model = wrapped_model()
    times: dict[str, list[float]] = {name: [] for name in calls()}
    for _ in range(rounds + 1):
        for name, call in calls().items():
            dist.barrier()
            started = time.perf_counter()
            call(model)
            dist.barrier()
            times[name].append(time.perf_counter() - started)
    return {name: measured[1:] for name, measured in times.items()}


def load_and_digests(rounds: int) -> tuple[list[float], list[float]]:
    """Return the time of a load in each round, and of its digests; the first round is not counted."""
    import torch.distributed as dist

    from mcore_ckpt_ext.colossalai import rank0_broadcast
    from mcore_ckpt_ext.colossalai.state_digest import digests
    from mcore_ckpt_ext.zero_strict_state_dict import zero_strict_load_state_dict, zero_strict_state_dict

    model = wrapped_model()
    state = zero_strict_state_dict(model, only_rank_0=False)
    of_digests: list[float] = []

    def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        found = digests(*arguments)
        of_digests.append(time.perf_counter() - started)
        return found

    vars(rank0_broadcast)["digests"] = timed
    of_loads = []
    for _ in range(rounds + 1):
        dist.barrier()
        started = time.perf_counter()
        zero_strict_load_state_dict(model, state)
        dist.barrier()
        of_loads.append(time.perf_counter() - started)
    return of_loads[1:], of_digests[1:]


def peak(name: str) -> float:
    """Return how much one call raises the peak resident set, in MiB."""
    # Freed memory is returned to the system at once, and does not count as used.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    model = wrapped_model()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS:")
    result = calls()[name](model)
    del result
    return (_status("VmHWM:") - before) / MIB


def _status(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Print medians, ratios and peaks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rounds", nargs="?", type=int, default=7)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    redirect.install()
    import colossalai.zero  # noqa: F401 - once, before the ranks are forked

    parameters = VOCABULARY * WIDTH + LAYERS * (WIDTH + 1) * WIDTH
    print(f"{parameters / 1e6:.0f} million parameters: {parameters * 4 / MIB:.0f} MiB in fp32, 2 ranks")
    print(f"largest chunk: {LARGEST_CHUNK:.0f} MiB in fp32")
    loads, digests = map(statistics.median, ranks.run(2, load_and_digests, rounds, timeout=900)[0])
    print(f"a load of the fp32 values: median {loads:.3f} s, of which the digests {digests / loads:.1%}")
    times = ranks.run(2, seconds, rounds, timeout=900)[0]
    own = statistics.median(times["ColossalAI, bf16"])
    for name, measured in times.items():
        first, second = ranks.run(2, peak, name, timeout=300)
        median = statistics.median(measured)
        print(
            f"{name:30} median {median:.3f} s, ratio {median / own:.2f}; "
            f"peak +{first:.0f} MiB on rank 0, +{second:.0f} MiB on rank 1"
        )


if __name__ == "__main__":
    main()
