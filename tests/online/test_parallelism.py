"""Every other way to spread a model, saved by genuine Megatron-LM 0.19.2 without the plugin, resumed with it.

There is no sidecar: the layout follows from the stored arguments and weights, or from the content. The live optimizer
right after the resume equals the one that was saved, bit for bit, as does what is read offline; training goes on with
the loss of the uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from megatron_on_cpu.dump_optimizer import parameter_settings

from mcore_ckpt_ext.formats.checkpoint import Checkpoint, open_checkpoint
from tests.megatron import assemble, launch, losses, train
from tests.online.jobs import RANK_SCRIPTS, differing
from tests.test_models_online import EXPERTS, GATED, Layout

CONTEXT = ("--context-parallel-size", "2")
INSTANCES = ("--num-distributed-optimizer-instances", "2", "--overlap-grad-reduce")
DECOUPLED = ["--decoupled-lr", "5e-4", "--decoupled-min-lr", "5e-5"]
# Large enough for every data-parallel rank to have more than padding: Megatron cannot save otherwise.
LARGER = ["--hidden-size", "64", "--untie-embeddings-and-output-weights"]
HIGH_BANDWIDTH = ("--ddp-pad-buckets-for-high-nccl-busbw",)
ACCOUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")


def stages(layout: str) -> tuple[str, ...]:
    return ("--pipeline-model-parallel-layout", layout)


def buckets(number: int) -> tuple[str, ...]:
    return ("--ddp-num-buckets", str(number))


def expert_sizes(expert: int, expert_tensor: int) -> tuple[str, ...]:
    sizes = ("--expert-model-parallel-size", str(expert), "--expert-tensor-parallel-size", str(expert_tensor))
    return ("--sequence-parallel", *sizes)


@dataclass(frozen=True)
class Case:
    """A model, the layout that it is saved under, those that it is resumed under, and what every rank runs first."""

    model: list[str]
    source: Layout
    targets: list[Layout]
    plugins: tuple[str, ...] = ()
    discovered: bool = False  # no rule knows the layout: it is found by content


CASES = {
    "context parallel": Case(
        GATED, Layout(8, 2, 2, CONTEXT), [Layout(4, 1, 2, CONTEXT), Layout(2, 1, 1)], ("context_parallel.py",)
    ),
    "to context parallel": Case(GATED, Layout(2, 1, 2), [Layout(4, 2, 1, CONTEXT)], ("context_parallel.py",)),
    "optimizer instances, a number of buckets, decoupled learning rate": Case(
        DECOUPLED,
        Layout(8, 1, 2, (*INSTANCES, *buckets(3))),
        [Layout(4, 2, 1), Layout(4, 1, 1, (*INSTANCES, *buckets(2)))],
    ),
    "buckets padded for high bandwidth": Case(
        LARGER, Layout(4, 1, 2, HIGH_BANDWIDTH), [Layout(4, 1, 2), Layout(2, 2, 1, HIGH_BANDWIDTH)]
    ),
    "a pipeline layout": Case(
        [], Layout(2, 1, 2, stages("Et|tttL")),
        [Layout(3, 1, 3, ACCOUNTED), Layout(4, 1, 4, stages("E|tt|tt|L")), Layout(2, 1, 2, stages("E|tt|t|tL"))],
        discovered=True,
    ),
    "an interleaved pipeline layout": Case(
        [], Layout(2, 1, 2, stages("E|tt|t|tL")), [Layout(2, 2, 1)], discovered=True
    ),
    "embedding and loss accounted as layers": Case(
        [], Layout(3, 1, 3, ACCOUNTED), [Layout(2, 1, 2, stages("Et|tttL"))]
    ),
    "experts cut by tensor parallelism, to whole": Case(
        EXPERTS, Layout(4, 2, 1, expert_sizes(2, 2)), [Layout(4, 2, 1, expert_sizes(2, 1))]
    ),
    "whole experts, to cut by tensor parallelism": Case(
        EXPERTS, Layout(4, 2, 1, expert_sizes(2, 1)), [Layout(4, 2, 1, expert_sizes(2, 2))]
    ),
    "multi-token prediction": Case(
        [*GATED, "--mtp-num-layers", "1"], Layout(4, 1, 2), [Layout(4, 2, 2), Layout(2, 1, 1)], discovered=True
    ),
    "frozen parameters": Case([], Layout(4, 1, 2), [Layout(4, 2, 2), Layout(2, 1, 1)], ("freeze.py",), True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_live_optimizer_equals_the_one_that_was_saved(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    plugins = [RANK_SCRIPTS / plugin for plugin in case.plugins]
    source, folder = case.source, tmp_path / "saved"
    saved = train(
        source.ranks, source.tensor, source.pipeline,
        folder=folder, more=[*case.model, *source.more], plugins=plugins, environment={"MCORE_CKPT_EXT": "0"},
    )  # fmt: skip
    assert saved.returncode == 0, saved.output[-6000:]
    dump, run = folder / "dump" / "after_save_0000004", folder / "checkpoints"
    truth = assemble(dump)
    checkpoint = open_checkpoint(run)
    assert differing(truth, offline(checkpoint)) == []
    assert ("discovery by content" in checkpoint.optimizer.witnesses()) == case.discovered
    for number, target in enumerate(case.targets):
        resumed = launch(
            target.ranks, run, target.tensor, target.pipeline,
            folder=tmp_path / str(number), more=[*case.model, *target.more], plugins=plugins,
        )  # fmt: skip
        assert resumed.returncode == 0, (target, resumed.output[-6000:])
        assert "[mcore_ckpt_ext] optimizer resumed" in resumed.output, target
        live = tmp_path / str(number) / "dump" / "after_load"
        assert differing(truth, assemble(live)) == [], target
        assert told_apart(parameter_settings(live)) == told_apart(parameter_settings(dump)), target
        assert losses(tmp_path / str(number))[5] == pytest.approx(losses(folder)[5], rel=1e-4), target


def offline(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """All that the checkpoint holds, read without Megatron."""
    return {
        f"{kind}.{name}": checkpoint.tensor(kind, name).read().view(checkpoint.tensor(kind, name).shape)
        for kind in checkpoint.kinds()
        for name in checkpoint.names(kind)
    }


def told_apart(settings: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
    """What the optimizer applies to each parameter; whether it is an expert's is no setting."""
    return {
        name: {key: value for key, value in values.items() if key != "is_expert_parallel"}
        for name, values in settings.items()
    }
