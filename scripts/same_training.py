"""Measures what training computes otherwise under another layout: features x dimensions, by genuine jobs in fp32.

    python scripts/same_training.py                       all features, as the table of the documentation
    python scripts/same_training.py --only "experts"      features whose name contains a text

Each feature is trained for four iterations on CPU ranks, then resumed under the old layout and under others. Shown is
the largest relative difference of loss and gradient norm in the next two iterations. Rounding stays below 2e-7;
`fails` is a layout that Megatron does not accept, or cannot run on a CPU. Masks leave out another number of tokens of
each sample, and attention runs under context parallelism (plugins of `megatron_on_cpu`).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from megatron_on_cpu import launch, record_losses, toy_jobs, train_only

SAVED, LAST = 4, 6
_LIMIT = 400
_LOSSES = "losses.json"


@dataclass(frozen=True)
class Layout:
    """The layout of a job: ranks, sizes, and samples of a micro batch."""

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    micro_batch: int = 1
    more: str = ""


OLD = Layout(4)
LAYOUTS = {
    "same": OLD,
    "DP 4 to 2": Layout(2),
    "micro batch 2": Layout(4, micro_batch=2),
    "TP 2": Layout(4, tensor=2, more="--sequence-parallel"),
    "TP 2 without sequence parallelism": Layout(4, tensor=2),
    "PP 2": Layout(4, pipeline=2),
    "CP 2": Layout(4, more="--context-parallel-size 2"),
    "EP 2": Layout(4, more="--expert-model-parallel-size 2"),
    "TP 2, EP 2, ETP 1": Layout(
        4, tensor=2, more="--sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    ),
}
"""The layouts under which each feature is resumed; those with `EP` only with experts."""
PLUGINS = (launch.CONTEXT_PARALLEL, launch.UNEVEN_MASKS, launch.TRAIN_ONLY)
"""Plugins of all jobs; each changes only the jobs that it is for."""
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type allgather --disable-bias-linear"
BALANCED = f"{_EXPERTS} --moe-aux-loss-coeff 1.0"
# Tied embeddings with pipeline stages cannot be saved by 0.19.2.
_PREDICTING = "--mtp-num-layers 1 --position-embedding-type rope --untie-embeddings-and-output-weights"
_DELTA_NETS = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq [1]*4 --linear-conv-kernel-dim 4 "
    "--linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 4 --linear-num-value-heads 4 "
    "--position-embedding-type none --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --spec megatron_on_cpu.delta_net_layers layer"
)
_MUON = "--optimizer muon --muon-tp-mode"
FEATURES = {
    "GPT": "",
    "GPT, masked losses": "--eod-mask-loss",
    "GPT, masked losses, per token": "--eod-mask-loss --calculate-per-token-loss",
    "SwiGLU, grouped queries": " ".join(toy_jobs.LLAMA),
    "attention sinks": "--softmax-type learnable",
    "attention sinks alone": "--softmax-type learnable",
    "latent attention": "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8 --position-embedding-type rope --normalization RMSNorm",
    "gated delta nets": _DELTA_NETS,
    "multi-token prediction": _PREDICTING,
    "multi-token prediction, masked losses": f"{_PREDICTING} --eod-mask-loss",
    "multi-token prediction, masked losses, per token": f"{_PREDICTING} --eod-mask-loss --calculate-per-token-loss",
    "experts, aux_loss": BALANCED,
    "experts, aux_loss, per token": f"{BALANCED} --calculate-per-token-loss",
    "experts, seq_aux_loss": f"{BALANCED} --moe-router-load-balancing-type seq_aux_loss",
    "experts, seq_aux_loss, per token": f"{BALANCED} --moe-router-load-balancing-type seq_aux_loss "
    "--calculate-per-token-loss",
    "experts, global_aux_loss": f"{BALANCED} --moe-router-load-balancing-type global_aux_loss",
    "experts, sinkhorn": f"{_EXPERTS} --moe-router-load-balancing-type sinkhorn",
    "experts, quantile balancing": f"{_EXPERTS} --moe-router-load-balancing-type quantile_balancing "
    "--moe-aux-loss-coeff 0",
    "experts, z loss": f"{_EXPERTS} --moe-z-loss-coeff 1.0",
    "experts, expert bias": f"{_EXPERTS} --moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    "experts, capacity factor 0.5": f"{_EXPERTS} --moe-expert-capacity-factor 0.5",
    "SGD": "--optimizer sgd",
    "Lion": "--optimizer lion",
    "Muon, duplicated": f"{_MUON} duplicated",
    "Muon, blockwise": f"{_MUON} blockwise",
    "Muon, distributed": f"{_MUON} distributed",
}
"""The features, as arguments of Megatron."""
TRAINED = {"attention sinks alone": "softmax_offset"}
"""Features that train only parameters with a part in their names; beside all others, their gradients are too small."""


def run(name: str, layout: Layout, until: int, folder: Path, load: Path | None = None, *, saves: bool = False) -> bool:
    """Run a job with a feature in its own folder, and return whether it succeeded."""
    feature = FEATURES[name].split()
    folder.mkdir()
    more = [
        *feature, *layout.more.split(), "--make-vocab-size-divisible-by", str(128 // layout.tensor),
        "--micro-batch-size", str(layout.micro_batch), "--exit-interval", str(until),
    ]  # fmt: skip
    optimizer = () if "--optimizer" in feature else ("--use-distributed-optimizer",)
    arguments = toy_jobs.tiny_gpt(
        layout.tensor, layout.pipeline, iterations=20, save=folder / "saved" if saves else None, save_interval=until,
        load=load, precision=(), optimizer=optimizer, more=more,
    )  # fmt: skip
    environment = {record_losses.FILE_VARIABLE: str(folder / _LOSSES), train_only.VARIABLE: TRAINED.get(name, "")}
    result = launch.run(
        layout.ranks, launch.TRAIN_GPT, arguments, timeout=_LIMIT, plugin_files=PLUGINS, log_file=folder / "log",
        environment=environment,
    )  # fmt: skip
    return result.returncode == 0


def measured(name: str, folder: Path) -> Iterator[tuple[str, float | None]]:
    """Yield each layout, and the largest relative difference from the old one; None if it fails."""
    first, reference = folder / "first", folder / "reference"
    has_saved = run(name, OLD, SAVED, first, saves=True) and run(name, OLD, LAST, reference, first / "saved")
    for label, layout in LAYOUTS.items():
        if "EP" in label and "--num-experts" not in FEATURES[name]:
            continue
        succeeded = has_saved and run(name, layout, LAST, folder / label, first / "saved")
        yield label, largest_difference(reference / _LOSSES, folder / label / _LOSSES) if succeeded else None


def largest_difference(base: Path, other: Path) -> float:
    """Return the largest relative difference of losses and gradient norms after a resume, by the files of two jobs.

    Raises:
        ValueError: a file is compared with itself, or a number is not finite.
    """
    if base == other:
        raise ValueError(f"{base} is compared with itself")
    expected = _recorded(base)
    actual = _recorded(other)
    differences = [
        abs(value / expected[step][key] - 1)
        for step, values in actual.items()
        if int(step) > SAVED
        for key, value in values.items()
    ]
    if not all(map(math.isfinite, differences)):
        raise ValueError(f"{other} has numbers that are not finite, or {base} has")
    return max(differences)


def _recorded(path: Path) -> dict[str, dict[str, float]]:
    """Return the losses and gradient norms of a job, by iteration."""
    numbers: dict[str, dict[str, float]] = json.loads(path.read_text())
    return numbers


def cells_of(differences: Mapping[str, float | None]) -> Iterator[str]:
    """Yield the cells of a row: empty for layouts that were not run."""
    for label in LAYOUTS:
        if label not in differences:
            yield ""
        else:
            size = differences[label]
            yield "fails" if size is None else f"{size:.0e}"


def main(words: Sequence[str] | None = None) -> None:
    """Print a row of Markdown for each feature."""
    parser = argparse.ArgumentParser(description="Measure what training computes otherwise under another layout.")
    parser.add_argument("--only", default="", metavar="TEXT", help="features whose name contains this text")
    only = parser.parse_args(words).only
    print("| feature |", " | ".join(LAYOUTS), "|", flush=True)
    print("|---" * (len(LAYOUTS) + 1), "|", sep="", flush=True)
    for name in FEATURES:
        if only not in name:
            continue
        folder = Path(tempfile.mkdtemp(prefix="same_training_"))
        print(f"| {name} |", " | ".join(cells_of(dict(measured(name, folder)))), "|", flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
