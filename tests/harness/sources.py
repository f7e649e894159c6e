"""Jobs of genuine Megatron-LM that fit the fixtures, and layouts in which these can be resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_on_cpu import launch
from megatron_on_cpu.precision_aware import REMAINDERS_VARIABLE

from tests.harness.checkpoints import fixture_named
from tests.harness.jobs import LEGACY, RANK_SCRIPTS
from tests.harness.layouts import SEQUENCE, Layout, expert_sizes
from tests.harness.models import GATED_EXPERTS, LLAMA, QUERIES

TOKENS = 128
MUON = ("--optimizer", "muon")
AWARE = ["--use-precision-aware-optimizer"]
OFFLOAD = [*AWARE, "--optimizer-cpu-offload", "--optimizer-offload-fraction"]
GATED_TWO = ["--num-layers", "2", "--swiglu", "--ffn-hidden-size", "64"]
UNTIED = ["--untie-embeddings-and-output-weights"]
ENGINE = [*LLAMA, "--add-qkv-bias", "--qk-layernorm"]
SHARED = [*GATED_EXPERTS, *QUERIES, "--moe-ffn-hidden-size", "16", "--moe-shared-expert-intermediate-size", "24"]
PLUGINS = (launch.PRECISION_AWARE, launch.CPU_OFFLOAD)


@dataclass(frozen=True)
class Source:
    """How a job that fits a fixture differs from the tiny GPT.

    Attributes:
        more: arguments of the model and of what is loaded.
        options: of `Turn`.
        plugins: of the launch, besides those of all.
    """

    more: Sequence[str] = ()
    options: dict[str, Any] = field(default_factory=dict)
    plugins: tuple[Path, ...] = ()


SOURCES = {
    "p02": Source(LLAMA),
    "p07": Source(["--max-position-embeddings", "35"]),
    "p08": Source(LEGACY),
    "p08b": Source(LEGACY),
    "p08c": Source(["--num-layers", "2", *LEGACY], {"optimizer": ()}),
    "p09": Source(GATED_EXPERTS),
    "p11": Source(["--overlap-grad-reduce", "--ddp-bucket-size", "3000"]),
    "p12": Source(["--num-layers", "2"]),
    "p21": Source(ENGINE),
    "p22": Source([*SHARED, "--moe-layer-freq", "[0,1,1,1]"], plugins=(RANK_SCRIPTS / "separate_norm.py",)),
    "p23": Source(["--hidden-size", "64", "--ffn-hidden-size", "32", "--kv-channels", "8"]),
    "p31": Source([*GATED_TWO, *UNTIED]),
    "p32": Source(["--num-layers", "2", *UNTIED]),
    "p33": Source(GATED_TWO),
    "p41": Source((), {"optimizer": ()}),
    "p42": Source(LLAMA, {"optimizer": (), "precision": ()}),
    "p43": Source(LLAMA, {"optimizer": MUON}),
    "p44": Source((), {"optimizer": (*MUON, "--use-distributed-optimizer")}),
    "p45": Source([*OFFLOAD, "1.0"]),
    "p46": Source([*LLAMA, *OFFLOAD, "0.5"]),
    "p47": Source(AWARE),
    "p47b": Source(AWARE),
    "p48": Source(
        [*LLAMA, *AWARE, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"],
        {"environment": {REMAINDERS_VARIABLE: "0"}},
    ),
    "p49": Source(LLAMA),
    "p51": Source(["--num-layers", "2", *UNTIED]),
}
"""Fixtures whose job is not the tiny GPT with Adam in a DistributedOptimizer."""


def layouts_of(name: str) -> dict[str, Layout]:
    """The layout that was saved, the same with fewer data-parallel ranks, and two others with as many rows."""
    written = fixture_named(name).job
    tensor, pipeline, ranks = written["layout"]["tp"], written["layout"]["pp"], written["world_size"]
    experts = written["layout"].get("ep", 1) or 1
    rows = (written.get("args") or {}).get("padded_vocab_size") or TOKENS
    own = Layout(tensor, pipeline, ranks, virtual=bool(written["layout"].get("vpp")), vocabulary=rows)
    found = {"own": own}
    if (ranks // 2) % (tensor * pipeline) == 0:
        found["less data"] = replace(own, ranks=ranks // 2)
    others = [one for one in _OTHERS if one != (tensor, pipeline)]
    found.update({f"moved {number}": Layout(*one, 4, vocabulary=rows) for number, one in enumerate(others[:2], 1)})
    if "--num-experts" not in SOURCES.get(name, Source()).more:
        return found
    return {kind: replace(one, more=_of_experts(one, experts)) for kind, one in found.items()}


def _of_experts(layout: Layout, experts: int) -> tuple[str, ...]:
    fitting = min(experts, layout.ranks // layout.pipeline)
    return (*(SEQUENCE if layout.tensor > 1 else ()), *expert_sizes(fitting, 1))


# Tensor-parallel size and number of stages: that the two query groups and the two layers of some models allow.
_OTHERS = ((2, 1), (1, 2), (1, 1))
