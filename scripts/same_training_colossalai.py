"""Measures what ColossalAI's plugins compute otherwise under another layout: features x dimensions, on CPU ranks.

    python scripts/same_training_colossalai.py                 all features, in an environment with ColossalAI
    python scripts/same_training_colossalai.py --only "ZeRO"   features whose name contains a text

Each feature is trained for four steps, saved, and resumed under the old layout and under others, with this package.
Shown is the largest relative difference of the loss and, with clipping, of the gradient norm in the next two steps.
Rounding stays below 1e-6 in fp32, and about 1e-2 in bf16, the only precision of Gemini and of stages of ZeRO in
HybridParallel that runs here. Every step reads the same eight samples; a data-parallel rank takes its share of them.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai_on_cpu import ranks, redirect

from mcore_ckpt_ext import zero_strict_state_dict

SAVED, LAST = 4, 6
SAMPLES, LENGTH, VOCABULARY = 8, 16, 128
IGNORED = -100
"""The label of tokens that are not in the loss."""
GEMINI, ZERO, HYBRID = "gemini", "low_level_zero", "hybrid_parallel"
_CLIPPED = 0.05


@dataclass(frozen=True)
class Layout:
    """Ranks and parallel sizes of a job."""

    ranks: int = 4
    tensor: int = 1
    stages: int = 1

    @property
    def data(self) -> int:
        """Return the data-parallel size."""
        return self.ranks // self.tensor // self.stages


@dataclass(frozen=True)
class Feature:
    """A plugin, the norm by which it clips gradients (0: not), and whether samples have masked tokens."""

    plugin: str
    zero: int = 0
    clipped: float = 0.0
    masked: bool = False

    @property
    def precision(self) -> str:
        """Return fp32 where the plugin accepts it."""
        return "bf16" if self.plugin == GEMINI or (self.plugin == HYBRID and self.zero) else "fp32"

    @property
    def rounding(self) -> float:
        """Return what rounding alone may make different."""
        return {"fp32": 1e-6, "bf16": 2e-2}[self.precision]


OLD = Layout()
LAYOUTS = {"same": OLD, "DP 4 to 2": Layout(2), "TP 2": Layout(tensor=2), "PP 2": Layout(stages=2)}
FEATURES = {
    "Gemini": Feature(GEMINI),
    "Gemini, clipping": Feature(GEMINI, clipped=_CLIPPED),
    "LowLevelZero": Feature(ZERO, zero=1),
    "LowLevelZero, clipping": Feature(ZERO, zero=2, clipped=_CLIPPED),
    "HybridParallel": Feature(HYBRID),
    "HybridParallel, clipping": Feature(HYBRID, clipped=_CLIPPED),
    "HybridParallel, ZeRO, clipping": Feature(HYBRID, zero=1, clipped=_CLIPPED),
    "HybridParallel, masked losses": Feature(HYBRID, masked=True),
}


def accepts(feature: Feature, layout: Layout) -> bool:
    """Return whether the plugin has the dimensions: LowLevelZero only data parallelism, Gemini no stages."""
    return {GEMINI: layout.stages, ZERO: layout.tensor * layout.stages, HYBRID: 1}[feature.plugin] == 1


def boost(feature: Feature, layout: Layout) -> tuple[Any, Any, Any]:
    """Return a Booster, and the model and optimizer that it wraps."""
    import colossalai.logging
    from colossalai.booster import Booster, plugin
    from colossalai.nn.optimizer import HybridAdam
    from transformers import GPT2Config, GPT2LMHeadModel

    colossalai.logging.disable_existing_loggers(["colossalai"])
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
    without_dropout: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    more: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager"}
    module = GPT2LMHeadModel(GPT2Config(**sizes, **without_dropout, **more))
    if feature.plugin == GEMINI:
        chunks = {layout.data: {"chunk_size": 4096, "keep_gathered": False}}
        chosen = plugin.GeminiPlugin(
            precision=feature.precision, tp_size=layout.tensor, chunk_config_dict=chunks, max_norm=feature.clipped
        )
    elif feature.plugin == ZERO:
        chosen = plugin.LowLevelZeroPlugin(stage=feature.zero, precision=feature.precision, max_norm=feature.clipped)
    else:
        chosen = plugin.HybridParallelPlugin(
            tp_size=layout.tensor, pp_size=layout.stages, zero_stage=feature.zero,
            precision=feature.precision,
            max_norm=feature.clipped, num_microbatches=2 if layout.stages > 1 else None,
        )  # fmt: skip
    booster = Booster(plugin=chosen)
    model, optimizer, *_ = booster.boost(module, HybridAdam(module.parameters(), lr=1e-3))
    return booster, model, optimizer


def batch(feature: Feature, layout: Layout, step: int) -> dict[str, torch.Tensor]:
    """Return this rank's share of the samples of a step: data parallelism is the outermost dimension of both meshes."""
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    if feature.masked:
        for number, sample in enumerate(labels):
            sample[: 2 * number] = IGNORED
    rank = dist.get_rank() // (layout.tensor * layout.stages)
    tokens, labels = (values.chunk(layout.data)[rank] for values in (tokens, labels))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def train(feature: Feature, layout: Layout, boosted: tuple[Any, Any, Any], steps: range) -> list[dict[str, float]]:
    """Return the loss, averaged over all samples, and the gradient norm of each step."""
    booster, model, optimizer = boosted
    numbers = []
    for step in steps:
        share = batch(feature, layout, step)
        if layout.stages > 1:
            loss = booster.execute_pipeline(iter([share]), model, lambda output, _: output.loss, optimizer)["loss"]
        else:
            loss = model(**share).loss
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses: list[float | None] = [None] * dist.get_world_size()
        dist.all_gather_object(losses, None if loss is None else loss.item())
        present = [value for value in losses if value is not None]
        norm = {"grad_norm": float(optimizer.get_grad_norm())} if feature.clipped else {}
        numbers.append({"loss": sum(present) / len(present), **norm})
    return numbers


def run(feature: Feature, layout: Layout, folder: Path, *, saves: bool) -> list[dict[str, float]]:
    """Train the first steps and save, or load and train the next; return the numbers of each step."""

    def job() -> list[dict[str, float]]:
        warnings.simplefilter("ignore")
        zero_strict_state_dict.install(plugins=(feature.plugin,))
        booster, model, optimizer = boosted = boost(feature, layout)
        model_file, optimizer_folder = str(folder / "model.bin"), str(folder / "optimizer")
        if saves:
            numbers = train(feature, layout, boosted, range(SAVED))
            booster.save_model(model, model_file)
            booster.save_optimizer(optimizer, optimizer_folder, shard=True)
            dist.barrier()
            return numbers
        booster.load_model(model, model_file)
        booster.load_optimizer(optimizer, optimizer_folder)
        return train(feature, layout, boosted, range(SAVED, LAST))

    numbers: list[dict[str, float]] = ranks.run(layout.ranks, job)[0]
    return numbers


def measured(name: str, folder: Path) -> Iterator[tuple[str, float]]:
    """Yield each layout that the plugin has, and the largest relative difference from the old one."""
    feature = FEATURES[name]
    run(feature, OLD, folder, saves=True)
    reference = run(feature, OLD, folder, saves=False)
    for label, layout in LAYOUTS.items():
        if accepts(feature, layout):
            numbers = run(feature, layout, folder, saves=False)
            yield label, largest_difference(reference, numbers)


def largest_difference(expected: list[dict[str, float]], actual: list[dict[str, float]]) -> float:
    """Return the largest relative difference of the numbers of two jobs, step by step."""
    pairs = zip(expected, actual, strict=True)
    return max(abs(numbers[key] / value - 1) for values, numbers in pairs for key, value in values.items())


def cells_of(differences: Mapping[str, float]) -> Iterator[str]:
    """Yield the cells of a row: empty for layouts that the plugin does not have."""
    for label in LAYOUTS:
        yield f"{differences[label]:.0e}" if label in differences else ""


def prepare() -> None:
    """Let ColossalAI run on CPU ranks; what is imported here need not be imported by each rank."""
    warnings.simplefilter("ignore")
    redirect.install()
    importlib.import_module("colossalai.booster.plugin")
    importlib.import_module("transformers.models.gpt2.modeling_gpt2")


def main() -> None:
    """Print a row of Markdown for each feature."""
    parser = argparse.ArgumentParser(description="Measure what ColossalAI computes otherwise under another layout.")
    parser.add_argument("--only", default="", metavar="TEXT", help="features whose name contains this text")
    only = parser.parse_args().only
    prepare()
    print("| feature |", " | ".join(LAYOUTS), "|", flush=True)
    print("|---" * (len(LAYOUTS) + 1), "|", sep="", flush=True)
    for name in FEATURES:
        if only not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="same_training_") as folder:
            print(f"| {name} |", " | ".join(cells_of(dict(measured(name, Path(folder))))), "|", flush=True)


if __name__ == "__main__":
    main()
