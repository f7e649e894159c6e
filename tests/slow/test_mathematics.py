"""Test more rows of the table of what training computes otherwise under another layout, by genuine jobs in fp32.

`tests/jobs/test_same_training.py` has the first. With `-s`, the differences are printed. TEST_FEATURES names features,
for a part.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import same_training
import torch
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count, z_loss_func
from megatron_on_cpu import train_only
from same_training import FEATURES, PLUGINS, TRAINED, largest_difference

from tests.harness.checkouts import only_for
from tests.harness.jobs import MAMBA_KERNELS, SAVED
from tests.harness.layouts import CONTEXT, SEQUENCE, Layout, expert_sizes
from tests.harness.turns import Results, Turn, run_in_turn

_ROUNDING = 1e-6
_DP4 = Layout(1, 1, 4)
_TP2 = Layout(2, 1, 4, more=SEQUENCE)
LAYOUTS = {
    "same": (_DP4, 1),
    "micro batch 2": (_DP4, 2),
    "TP 2": (_TP2, 1),
    "TP 2, micro batch 2": (_TP2, 2),
    "TP 2 without sequence parallelism": (Layout(2, 1, 4), 1),
    "CP 2": (Layout(1, 1, 4, more=(CONTEXT, "2")), 1),
    "256 rows": (Layout(1, 1, 4, vocabulary=256), 1),
    "batch of 16": (Layout(1, 1, 4, more=("--global-batch-size", "16", "--override-opt_param-scheduler")), 1),
    "TP 2, EP 2, ETP 1": (Layout(2, 1, 4, more=(*SEQUENCE, *expert_sizes(2, 1))), 1),
}
"""Layouts, and the samples of a micro batch."""
CASES = {
    ("GPT", "CP 2"): True,
    ("GPT", "256 rows"): False,
    ("GPT", "batch of 16"): False,
    ("GPT, masked losses", "micro batch 2"): False,
    ("GPT, masked losses", "CP 2"): False,
    ("GPT, masked losses, per token", "micro batch 2"): True,
    ("GPT, masked losses, per token", "CP 2"): True,
    ("multi-token prediction", "micro batch 2"): True,
    ("multi-token prediction", "CP 2"): False,
    ("multi-token prediction, masked losses, per token", "micro batch 2"): False,
    ("multi-token prediction, masked losses, per token", "CP 2"): False,
    # As many micro batches as before, of half of the data-parallel ranks.
    ("experts, global_aux_loss", "TP 2, micro batch 2"): False,
    ("experts, sinkhorn", "micro batch 2"): False,
    ("experts, sinkhorn", "TP 2"): False,
    ("experts, quantile balancing", "TP 2"): True,
    ("experts, quantile balancing", "micro batch 2"): False,
    ("experts, seq_aux_loss, per token", "micro batch 2"): True,
    ("experts, capacity factor 0.5", "micro batch 2"): False,
    ("experts, seq_aux_loss", "TP 2, EP 2, ETP 1"): True,
    ("Muon, blockwise", "TP 2"): False,
    ("gated delta nets", "micro batch 2"): True,
    ("gated delta nets", "TP 2"): True,
    ("gated delta nets", "TP 2 without sequence parallelism"): False,
    ("gated delta nets", "CP 2"): True,
    ("attention sinks alone", "micro batch 2"): True,
    ("attention sinks alone", "TP 2"): False,
}
"""Features under a layout, and whether they then compute the same."""
if "TEST_FEATURES" in os.environ:
    CASES = {case: is_same for case, is_same in CASES.items() if case[0] in os.environ["TEST_FEATURES"].split(";")}
OF_0_16 = {
    ("experts, aux_loss, per token", "TP 2"): False,
    ("experts, seq_aux_loss, per token", "micro batch 2"): False,
}
"""The same, of defects of core_v0.12.0 and 0.16.0 to 0.18.2."""
MAMBA = (
    "--mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-num-heads 8 --position-embedding-type none "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--spec hybrid_layers stack_with_norms --hybrid-layer-pattern M*M-M*"
)
"""A hybrid model with the layer spec of the tests; its norms and scans are those of `mamba_kernels.py`."""


def _train(
    folder: Path, cases: Mapping[tuple[str, str], bool], plugins: Sequence[Path] = (), *, of_checkout: bool = False
) -> Results:
    """Train each feature for four iterations, then resume it for two under its own layout and under others."""

    def turn(feature: str, name: str, load: str = "") -> Turn:
        layout, micro = LAYOUTS[name]
        words = FEATURES.get(feature, MAMBA).split()
        optimizer = () if "--optimizer" in words else ("--use-distributed-optimizer",)
        return Turn(
            folder / f"{feature}; {name if load else 'saved'}", layout, saves=not load,
            load=folder / load / "checkpoints" if load else None, until=SAVED + 2 if load else SAVED, precision=(),
            optimizer=optimizer, more=[*words, "--micro-batch-size", str(micro)],
            environment={train_only.VARIABLE: TRAINED.get(feature, "")},
        )  # fmt: skip

    turns = []
    for feature in dict.fromkeys(feature for feature, _ in cases):
        names = ["same", *(name for other, name in cases if other == feature)]
        turns += [turn(feature, "same"), *(turn(feature, name, f"{feature}; saved") for name in names)]
    return run_in_turn(folder, turns, plugins, of_checkout=of_checkout)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _train(tmp_path_factory.mktemp("mathematics"), CASES, PLUGINS)


def _difference(results: Results, feature: str, name: str) -> float:
    same, other = (results.job(f"{feature}; {layout}").folder / "losses.json" for layout in ("same", name))
    difference = largest_difference(same, other)
    print(f"{feature}; {name}: {difference:.1e}")
    return difference


@pytest.mark.parametrize(("feature", "name"), CASES)
def test_the_computation_differs_where_the_table_says_so(results: Results, feature: str, name: str) -> None:
    assert (_difference(results, feature, name) < _ROUNDING) is CASES[feature, name]


def test_mamba_layers_compute_the_same(tmp_path: Path) -> None:
    cases = {("Mamba", "micro batch 2"): True, ("Mamba", "TP 2"): True}
    results = _train(tmp_path, cases, [MAMBA_KERNELS])
    for feature, name in cases:
        assert 0 < _difference(results, feature, name) < _ROUNDING


@only_for("0.16")
def test_balancing_losses_per_token_are_scaled_by_ranks_or_micro_batches_in_earlier_releases(tmp_path: Path) -> None:
    results = _train(tmp_path, OF_0_16, of_checkout=True)
    for (feature, name), is_same in OF_0_16.items():
        assert (_difference(results, feature, name) < _ROUNDING) is is_same


def _smoothed(rank: int, ranks: int, folder: Path, results: Any) -> None:
    """Tell the loss of each token on a rank with its rows of the vocabulary."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{ranks}", rank=rank, world_size=ranks)
    logits = torch.randn(6, 1, 8, generator=torch.Generator().manual_seed(1)).chunk(ranks, dim=-1)[rank]
    losses = [
        vocab_parallel_cross_entropy(logits.clone(), torch.arange(6)[:, None], smoothing, torch.distributed.group.WORLD)
        for smoothing in (0.0, 0.1)
    ]
    results.put((rank, [loss.flatten().tolist() for loss in losses]))
    torch.distributed.destroy_process_group()


def _told_by_ranks(tell: Callable[..., None], ranks: int, folder: Path) -> dict[int, Any]:
    """Return what each rank tells, in processes of their own."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=tell, args=(rank, ranks, folder, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    told = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    return told


def test_label_smoothing_averages_over_the_rows_of_one_rank(tmp_path: Path) -> None:
    losses: dict[int, dict[int, list[list[float]]]] = {
        ranks: _told_by_ranks(_smoothed, ranks, tmp_path) for ranks in (1, 2)
    }
    (plain, smoothed), (first, of_first), (second, of_second) = losses[1][0], losses[2][0], losses[2][1]
    assert first == second == pytest.approx(plain)
    for other in (of_second, smoothed):
        assert of_first != pytest.approx(other, rel=1e-3)


def _counted(rank: int, ranks: int, folder: Path, results: Any) -> None:
    """Tell how many tokens a rank counts as its own, of 2 on the first rank and 4 on the second."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{ranks}", rank=rank, world_size=ranks)
    routes = torch.zeros(6, 4, dtype=torch.bool)
    routes[: 2 + 2 * rank, 0] = True
    counts = get_tokens_per_expert_and_token_count(routes, torch.distributed.group.WORLD, 1, with_padding_mask=True)
    results.put((rank, [float(count) for count in counts[1:]]))
    torch.distributed.destroy_process_group()


def test_a_router_counts_the_tokens_of_all_ranks_as_its_own_if_some_are_masked(tmp_path: Path) -> None:
    assert _told_by_ranks(_counted, 2, tmp_path) == {0: [6.0, 6.0], 1: [6.0, 6.0]}
    assert _told_by_ranks(_counted, 1, tmp_path) == {0: [2.0, 2.0]}


def test_z_loss_averages_over_the_unmasked_tokens_of_each_rank() -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    masked = torch.tensor([False, True, True, False, False, False])
    whole = float(z_loss_func(logits, 1.0, padding_mask=masked))
    of_ranks = [float(z_loss_func(logits[half], 1.0, padding_mask=masked[half])) for half in (slice(3), slice(3, 6))]
    assert sum(of_ranks) / 2 != pytest.approx(whole, rel=1e-3)


def test_no_argument_of_megatron_smooths_labels() -> None:
    assert "smoothing" not in inspect.getsource(importlib.import_module("megatron.training.arguments"))
    assert not any("smoothing" in field.name for field in dataclasses.fields(TransformerConfig))


def test_the_program_shows_what_the_tests_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: same_training.LAYOUTS[name] for name in ("same", "micro batch 2")}
    monkeypatch.setattr(same_training, "LAYOUTS", few)
    differences = dict(same_training.measured("experts, aux_loss", tmp_path))
    assert differences["same"] == 0.0
    assert differences["micro batch 2"] == pytest.approx(2.4e-3, rel=0.05)


class _WordTokenizer:
    """One token for each word, of which the loss leaves out the first two."""

    eod, pad = 1, 0

    def tokenize_conversation(self, conversation: Any, **options: bool) -> tuple[Any, Any]:
        tokens = torch.tensor([int(word) for turn in conversation for word in turn["content"].split()])
        return tokens, torch.cat([torch.full((2,), -100), tokens[2:]])


@pytest.mark.parametrize(("lengths", "is_cut"), [((11, 9, 7, 5, 13, 11, 7), True), ((11, 9, 7), False)])
def test_conversations_that_fill_a_sample_are_cut_by_context_parallelism(
    lengths: tuple[int, ...], is_cut: bool
) -> None:
    module: Any = importlib.import_module("megatron.training.datasets.sft_dataset")
    packed = [
        {"role": role, "content": " ".join(words)}
        for length in lengths
        for role, words in (("system", ["5", "6"]), ("user", [str(10 + number) for number in range(length - 2)]))
    ]

    def tokens_in_loss(context: int) -> int:
        dataset = module.SFTDataset.__new__(module.SFTDataset)
        dataset.dataset, dataset.indices = [packed], [0]
        dataset.config = SimpleNamespace(
            tokenizer=_WordTokenizer(), sequence_length=64, context_parallel_size=context, reset_position_ids=False,
            reset_attention_mask=False, create_attention_mask=False,
        )  # fmt: skip
        return int(dataset[0]["loss_mask"].sum())

    assert tokens_in_loss(1) == sum(lengths) - 2 * len(lengths)
    assert (tokens_in_loss(2) < tokens_in_loss(1)) is is_cut
    assert (tokens_in_loss(1), tokens_in_loss(2)) == (49, 41) or not is_cut
