"""Train twelve iterations in one go, and as four under each of three layouts: the same but for rounding.

In fp32, but for optimizers that train only bf16. TEST_FEATURES names features of `scripts/same_training.py`, of `SAVES`
or of `BF16`, for a part. Of the optimizers of Megatron 0.19.2, these rows are missing:

| optimizer | why it cannot be trained there and back |
|---|---|
| SOAP | Megatron cannot save it in `torch_dist` (`tests/jobs/test_muon.py`) |
| adaptive Muon | its first step fails in Megatron, with emerging-optimizers 0.3.0 (`tests/jobs/test_muon.py`) |
| offloaded Adam in fp32 | Megatron cannot build it: torch takes no view of a parameter |
| `--optimizer-cuda-graph` | CUDA graphs need a GPU |
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from megatron_on_cpu import launch, train_only
from same_training import FEATURES, PLUGINS, TRAINED, largest_difference

from tests.harness.layouts import SEQUENCE, Layout
from tests.harness.turns import Turn, run_in_turn

_EVERY, _LAST = 4, 12
_DP8 = Layout(1, 1, 8)
_TP2 = Layout(2, 2, 8, more=SEQUENCE)
_PP2 = Layout(1, 2, 8)
THERE = {
    "experts, global_aux_loss": (_TP2, Layout(1, 4, 8)),
    "experts, sinkhorn": (_DP8, _PP2),
    "experts, capacity factor 0.5": (_DP8, _PP2),
    "Muon, blockwise": (_DP8, _PP2),
    "attention sinks alone": (_DP8, _PP2),
}
"""Features that compute something else under TP2 x PP2 x DP2 than under DP8: two layouts that keep them."""
SAVES = {
    "asynchronous saves": "--async-save --use-persistent-ckpt-worker",
    "fully_reshardable": "--dist-ckpt-optim-fully-reshardable",
    "precision-aware Adam in fp32": "--use-precision-aware-optimizer",
}
_AWARE = "--use-precision-aware-optimizer"
BF16 = {
    "Adam in bf16": "",
    "precision-aware Adam": _AWARE,
    "precision-aware Adam, moments in bf16": f"{_AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "Adam, half of it offloaded": f"{_AWARE} --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
}
"""Optimizers of which a plugin on a CPU serves one, and Adam beside them."""
_OPTIMIZER_PLUGINS = {
    "precision-aware Adam in fp32": launch.PRECISION_AWARE,
    "precision-aware Adam": launch.PRECISION_AWARE,
    "precision-aware Adam, moments in bf16": launch.PRECISION_AWARE,
    "Adam, half of it offloaded": launch.CPU_OFFLOAD,
}
# Muon's iteration in bf16 amplifies rounding.
_LARGEST = {"Muon, duplicated": 1e-3, "Muon, distributed": 1e-3, "Muon, blockwise": 1e-3, **dict.fromkeys(BF16, 5e-3)}
_ROUNDING = 1e-6
NAMES = os.environ["TEST_FEATURES"].split(";") if "TEST_FEATURES" in os.environ else sorted({*FEATURES, *SAVES, *BF16})


@pytest.mark.parametrize("name", NAMES)
def test_training_there_and_back_is_training_in_one_go(name: str, tmp_path: Path) -> None:
    feature = {**FEATURES, **SAVES, **BF16}[name].split()
    # Megatron saves no bucket of a distributed optimizer in which a rank has nothing (`distrib_optimizer.py`).
    optimizer = () if "--optimizer" in feature or name in TRAINED else ("--use-distributed-optimizer",)
    precision = {} if name in BF16 else {"precision": ()}
    here, there = THERE.get(name, (_DP8, _TP2))

    def turn(label: str, layout: Layout, until: int, load: str = "") -> Turn:
        return Turn(
            tmp_path / label, layout, load=tmp_path / load / "checkpoints" if load else None, saves=True, until=until,
            newest=until, optimizer=optimizer, environment={train_only.VARIABLE: TRAINED.get(name, "")},
            more=[*feature, "--micro-batch-size", "1", "--train-iters", str(_LAST),
                  "--ckpt-fully-parallel-save"],
            **precision,
        )  # fmt: skip

    results = run_in_turn(
        tmp_path,
        [
            turn("alone", here, _LAST),
            turn("first", here, _EVERY),
            turn("there", there, 2 * _EVERY, "first"),
            turn("back", here, _LAST, "there"),
        ],
        [*PLUGINS, *([_OPTIMIZER_PLUGINS[name]] if name in _OPTIMIZER_PLUGINS else [])],
    )
    alone, back = (results.job(label).folder / "losses.json" for label in ("alone", "back"))
    assert set(json.loads(back.read_text())) == {str(step) for step in range(2 * _EVERY + 1, _LAST + 1)}
    difference = largest_difference(alone, back)
    assert difference < _LARGEST.get(name, _ROUNDING)
    print(name, f"{difference:.1e}")
