"""Measures what training computes otherwise under another layout: features x dimensions, by genuine jobs in fp32.

    python scripts/same_training.py                       all features, as the table of the documentation
    python scripts/same_training.py --only "experts"      features whose name contains a text

Each feature is trained for four iterations on CPU ranks, then resumed under the old layout and under others. Shown is
the largest relative difference of loss and gradient norm in the next two iterations. Rounding stays below 2e-7;
`fails` is a layout that Megatron does not accept, or cannot run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from megatron_on_cpu import launch, toy_jobs

SAVED, LAST = 4, 6
_LIMIT = 400


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
    "PP 2": Layout(4, pipeline=2),
    "CP 2": Layout(4, more="--context-parallel-size 2"),
    "EP 2": Layout(4, more="--expert-model-parallel-size 2"),
}
"""The layouts under which each feature is resumed; `EP 2` only with experts."""
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type allgather --disable-bias-linear"
BALANCED = f"{_EXPERTS} --moe-aux-loss-coeff 1.0"
_MUON = "--optimizer muon --muon-tp-mode"
FEATURES = {
    "GPT": "",
    "GPT, masked losses": "--eod-mask-loss",
    "GPT, masked losses, per token": "--eod-mask-loss --calculate-per-token-loss",
    "SwiGLU, grouped queries": " ".join(toy_jobs.LLAMA),
    "attention sinks": "--softmax-type learnable",
    "latent attention": "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8 --position-embedding-type rope --normalization RMSNorm",
    "multi-token prediction": "--mtp-num-layers 1 --position-embedding-type rope",
    "experts, aux_loss": BALANCED,
    "experts, aux_loss, per token": f"{BALANCED} --calculate-per-token-loss",
    "experts, seq_aux_loss": f"{BALANCED} --moe-router-load-balancing-type seq_aux_loss",
    "experts, global_aux_loss": f"{BALANCED} --moe-router-load-balancing-type global_aux_loss",
    "experts, sinkhorn": f"{_EXPERTS} --moe-router-load-balancing-type sinkhorn",
    "experts, z loss": f"{_EXPERTS} --moe-z-loss-coeff 1.0",
    "experts, expert bias": f"{_EXPERTS} --moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    "experts, capacity factor 0.5": f"{_EXPERTS} --moe-expert-capacity-factor 0.5",
    "Muon, duplicated": f"{_MUON} duplicated",
    "Muon, blockwise": f"{_MUON} blockwise",
    "Muon, distributed": f"{_MUON} distributed",
}
"""The features, as arguments of Megatron."""


def run(layout: Layout, feature: str, until: int, folder: Path, load: Path | None, save: Path | None) -> Path | None:
    """Run a job, and return the file with its losses; None if it failed."""
    losses = folder / "losses.json"
    more = [
        *feature.split(), *layout.more.split(), "--make-vocab-size-divisible-by", str(128 // layout.tensor),
        "--micro-batch-size", str(layout.micro_batch), "--exit-interval", str(until),
    ]  # fmt: skip
    optimizer = () if "--optimizer" in feature else ("--use-distributed-optimizer",)
    arguments = toy_jobs.tiny_gpt(
        layout.tensor, layout.pipeline, iterations=20, save=save, save_interval=until, load=load, precision=(),
        optimizer=optimizer, more=more,
    )  # fmt: skip
    result = launch.run(
        layout.ranks, launch.TRAIN_GPT, arguments, timeout=_LIMIT, log_file=folder / "log",
        environment={"MEGATRON_ON_CPU_LOSSES": str(losses)},
    )  # fmt: skip
    return losses if result.returncode == 0 else None


def measured(name: str, folder: Path) -> Iterator[tuple[str, float | None]]:
    """Yield each layout, and the largest relative difference from the old one; None if it fails."""
    feature, saved = FEATURES[name], folder / "saved"
    if run(OLD, feature, SAVED, folder, None, saved) is None:
        yield from ((layout, None) for layout in LAYOUTS)
        return
    base: Path | None = None
    for label, layout in LAYOUTS.items():
        if label == "EP 2" and "--num-experts" not in feature:
            continue
        losses = run(layout, feature, LAST, folder, saved, None)
        if losses is None:
            yield label, None
            continue
        base = base or losses
        yield label, largest_difference(base, losses)


def largest_difference(base: Path, other: Path) -> float:
    """Return the largest relative difference of losses and gradient norms after a resume, by the files of two jobs."""
    records: list[dict[str, dict[str, float]]] = [
        {step: values for step, values in json.loads(file.read_text()).items() if int(step) > SAVED}
        for file in (base, other)
    ]
    expected, found = records
    return max(abs(values[key] / expected[step][key] - 1) for step, values in found.items() for key in values)


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
        found = dict(measured(name, folder))
        cells = (
            "" if label not in found else "fails" if (size := found[label]) is None else f"{size:.0e}"
            for label in LAYOUTS
        )
        print(f"| {name} |", " | ".join(cells), "|", flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
