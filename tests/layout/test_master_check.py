"""Test the comparison of masters with fp8, fp4 and fp16 numbers, made by torch's own casts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import reduce
from itertools import permutations
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mcore_ckpt_ext.errors import ProofError, UnsupportedCheckpointError
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout import packing_recovery
from mcore_ckpt_ext.layout.buckets import BucketKey, OptimizerGroup, Placed, Placement
from mcore_ckpt_ext.layout.master_check import (
    BY_EITHER_ROUNDING,
    BY_ROUNDING,
    WITHIN_FP4,
    WITHIN_FP4_TWICE,
    WITHIN_FP8,
    WITHIN_FP16,
    MasterCheck,
    has_fused_masters,
    master_check_of,
    smallest_step,
    weaker_of,
)
from mcore_ckpt_ext.layout.quantized import is_quantized
from mcore_ckpt_ext.megatron import check_after_load as hooks_proof
from mcore_ckpt_ext.megatron.live import master_check as live_check
from mcore_ckpt_ext.megatron.live.model import LiveParameter
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import LiveShard
from mcore_ckpt_ext.model_space.slices import Region, Slice

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
# All numbers of E2M1 (OCP Microscaling Formats, 1.0), and where rounding to nearest goes from one to the next.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def masters(rows: int = 128, columns: int = 256, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def fp8(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantized and dequantized, as a checkpoint has it."""
    return ((values * scale).clamp(-LARGEST, LARGEST).to(E4M3).float() / scale).bfloat16()


def by_tensor(values: torch.Tensor) -> torch.Tensor:
    return fp8(values, LARGEST / values.abs().max())


def by_delayed_scale(values: torch.Tensor) -> torch.Tensor:
    """The scale of some steps ago, when the largest number was smaller: what is larger is border off."""
    return fp8(values, LARGEST / (values.abs().max() * 0.8))


def by_stale_scale(values: torch.Tensor) -> torch.Tensor:
    """The scale remembers a number eight times as large."""
    return fp8(values, LARGEST / (values.abs().max() * 8))


def by_first_scale(values: torch.Tensor) -> torch.Tensor:
    """A delayed scale that has not seen a number yet: most weights are a few of the smallest steps."""
    return fp8(values, torch.tensor(1.0))


def by_blocks(values: torch.Tensor) -> torch.Tensor:
    """128 x 128 elements have a scale, a power of two."""
    tiles = values.view(1, 128, 2, 128)
    scale = torch.exp2(torch.floor(torch.log2(LARGEST / tiles.abs().amax((1, 3), keepdim=True))))
    return fp8(tiles, scale).view(values.shape)


def by_microscaling(values: torch.Tensor) -> torch.Tensor:
    """32 elements of a row have one."""
    tiles = values.view(128, 8, 32)
    scale = torch.exp2(torch.floor(torch.log2(LARGEST / tiles.abs().amax(2, keepdim=True))))
    return fp8(tiles, scale).view(values.shape)


def fp4(values: torch.Tensor) -> torch.Tensor:
    """16 elements of a row have a scale, which is an fp8 number itself."""
    tiles = values.view(128, 16, 16)
    whole = LARGEST * 6 / values.abs().max()
    scale = (tiles.abs().amax(2, keepdim=True) / 6 * whole).to(E4M3).float() / whole
    halfway = (E2M1[1:] + E2M1[:-1]) / 2
    rounded = E2M1[torch.bucketize((tiles / scale).abs(), halfway)]
    return (rounded * tiles.sign() * scale).bfloat16().view(values.shape)


QUANTIZING = [
    (WITHIN_FP8, by_tensor),
    (WITHIN_FP8, by_delayed_scale),
    (WITHIN_FP8, by_stale_scale),
    (WITHIN_FP8, by_first_scale),
    (WITHIN_FP8, by_blocks),
    (WITHIN_FP8, by_microscaling),
    (WITHIN_FP4, fp4),
]


@pytest.mark.parametrize(("master_check", "quantize"), QUANTIZING)
def test_masters_are_near_what_they_were_quantized_to(master_check: MasterCheck, quantize: object) -> None:
    for seed in range(4):
        master = masters(seed=seed)
        weight = quantize(master)  # type: ignore[operator]
        assert BY_ROUNDING.first_mismatch(master, weight) is not None
        assert master_check.first_mismatch(master, weight) is None
        for part in (slice(0, 1), slice(5, 70)):  # whatever part is at hand
            assert master_check.first_mismatch(master[part], weight[part]) is None
        # In a job that starts from bf16 weights these are quantized, not the masters.
        assert master_check.first_mismatch(master, quantize(master.bfloat16().float())) is None  # type: ignore[operator]


@pytest.mark.parametrize(("master_check", "quantize"), QUANTIZING)
def test_a_misplaced_parameter_is_far_in_a_sample(master_check: MasterCheck, quantize: object) -> None:
    master = masters()
    weight = quantize(master)  # type: ignore[operator]
    for wrong in (master.roll(1), master.flip(1), masters(seed=2), -master, master * 1.5, torch.zeros_like(master)):
        assert master_check.first_mismatch(wrong.view(-1)[:64], weight.view(-1)[:64]) is not None
    assert master_check.first_mismatch(torch.full_like(master, float("nan")), weight) is not None


def test_the_scale_defines_what_is_near_if_all_weights_are_zero() -> None:
    """A scale that does not fit, and masters below half its smallest step."""
    master = masters() / 128
    weight = by_first_scale(master)
    assert not weight.any()
    step = smallest_step(E4M3, 1.0)
    assert WITHIN_FP8.first_mismatch(master, weight) is not None
    assert WITHIN_FP8.with_step(step).first_mismatch(master, weight) is None
    assert WITHIN_FP8.with_step(step / 2).first_mismatch(master, weight) is not None
    assert weaker_of(WITHIN_FP8, WITHIN_FP8.with_step(step)).first_mismatch(master * 1.9, weight) is None
    assert BY_ROUNDING.with_step(step) is BY_ROUNDING


def test_weights_that_were_quantized_again_at_another_scale() -> None:
    """As under another tensor parallelism, which borders other parts out of a tensor."""
    twice = weaker_of(WITHIN_FP8, WITHIN_FP8)
    for seed in range(4):
        master = masters(seed=seed)
        weight = by_tensor(master)
        parts = torch.cat([fp8(part.float(), LARGEST / part.abs().max() * 0.7) for part in weight.chunk(2)])
        assert WITHIN_FP8.first_mismatch(master, parts) is not None
        assert twice.first_mismatch(master, parts) is None
        assert twice.first_mismatch(master.roll(1).view(-1)[:64], parts.view(-1)[:64]) is not None


@pytest.mark.parametrize("parts", list(permutations((WITHIN_FP8, WITHIN_FP8, WITHIN_FP4))))
def test_the_weakest_of_several_checks_does_not_depend_on_their_order(parts: tuple[MasterCheck, ...]) -> None:
    assert reduce(weaker_of, parts) is WITHIN_FP4_TWICE


def test_errors_below_half_an_fp8_step_pass() -> None:
    """A bit that moves a master by less than half a step; the same bit is seen beside bf16 weights."""
    master = masters()
    flipped = master.clone()
    flipped.view(torch.int32)[0, 0] ^= 1 << 17
    assert BY_ROUNDING.first_mismatch(flipped, master.bfloat16()) is not None
    assert WITHIN_FP8.first_mismatch(flipped, by_tensor(master)) is None
    flipped.view(torch.int32)[0, 0] ^= 1 << 22
    found = WITHIN_FP8.first_mismatch(flipped, by_tensor(master))
    assert found is not None
    assert (found.position, found.count) == (0, 1)


@pytest.mark.parametrize(
    ("master_check", "quantize", "share"), [(WITHIN_FP8, by_microscaling, 2**-12), (WITHIN_FP4, fp4, 2**-4)]
)
def test_a_block_of_small_weights_is_measured_by_the_largest_weight_at_hand(
    master_check: MasterCheck, quantize: object, share: float
) -> None:
    """Many of its own steps away from a weight of zero, a master is near all the same; and no further."""
    master = masters()
    master[0, :16] = 0.0
    master[0, 1] = master.abs().max() * share / 8
    weight = quantize(master)  # type: ignore[operator]
    largest = float(weight.abs().max())
    assert weight[0, 0] == 0 and weight[0, 1] != 0
    master[0, 0] = largest * share * 0.9
    assert master[0, 0] > 6 * weight[0, 1]
    assert master_check.first_mismatch(master, weight) is None
    master[0, 0] = largest * share * 1.1
    found = master_check.first_mismatch(master, weight)
    assert found is not None and found.position == 0


def half(values: torch.Tensor) -> torch.Tensor:
    """As FusedAdam keeps masters in fp16: divided by a scale that puts the largest at half of fp16's range."""
    scale = values.abs().max() / (torch.finfo(torch.float16).max / 2)
    return (values / scale).half().float() * scale


def test_masters_in_half_precision_that_were_resumed_under_another_layout() -> None:
    """Every shard has a scale of its own, at which the number is rounded once more."""
    for seed in range(4):
        master = masters(2048, 512, seed)
        again = torch.cat([half(part) for part in half(master).chunk(3)])
        assert WITHIN_FP16.first_mismatch(again, master.bfloat16()) is None


def test_masters_in_half_precision() -> None:
    master = masters()
    weight = master.bfloat16()
    assert WITHIN_FP16.first_mismatch(half(master), weight) is None
    assert WITHIN_FP16.first_mismatch(half(master).roll(1), weight) is not None
    one = half(master)
    one[3, 3] *= 1 + 2**-7
    found = WITHIN_FP16.first_mismatch(one, weight)
    assert found is not None
    assert found.position == 3 * 256 + 3


@pytest.mark.parametrize(
    ("arguments", "master_check"),
    [
        ({}, BY_ROUNDING),
        ({"use_precision_aware_optimizer": True}, BY_EITHER_ROUNDING),
        ({"use_precision_aware_optimizer": True, "main_params_dtype": torch.float16}, WITHIN_FP16),
        ({"fp8_param_gather": True}, WITHIN_FP8),
        ({"fp4_param_gather": True}, WITHIN_FP4),
    ],
)
def test_the_proof_of_a_job(arguments: dict[str, object], master_check: MasterCheck) -> None:
    assert master_check_of(JobArguments.of(arguments)) is master_check
    assert weaker_of(BY_ROUNDING, master_check) is master_check
    assert (weaker_of(master_check, master_check) is master_check) == (master_check not in (WITHIN_FP8, WITHIN_FP4))
    assert weaker_of(master_check, BY_ROUNDING) is master_check
    assert weaker_of(master_check, None) is master_check


@pytest.mark.parametrize(
    ("arguments", "fused"),
    [
        ({}, False),
        ({"use_precision_aware_optimizer": True, "fp8_recipe": "delayed"}, True),
        ({"use_precision_aware_optimizer": True, "fp8_recipe": "tensorwise"}, False),
        ({"use_precision_aware_optimizer": True, "fp8_recipe": "tensorwise", "main_params_dtype": "fp16"}, True),
        ({"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}, False),
    ],
)
def test_who_keeps_the_masters(arguments: dict[str, object], fused: bool) -> None:
    assert has_fused_masters(JobArguments.of(arguments)) is fused


def test_quantized_parameters() -> None:
    arguments = JobArguments.of({"fp8_param_gather": True, "num_layers": 4})
    quantized = ["mlp.experts.experts.5.linear_fc1.weight", "self_attention.linear_qkv.weight", "mixer.in_proj.weight"]
    plain = ["self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.bias", "mlp.router.weight"]
    names = [f"decoder.layers.0.{name}" for name in (*quantized, *plain)]
    names += ["embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"]
    assert [name for name in names if is_quantized(name, arguments)] == names[:3]
    assert not any(is_quantized(name, JobArguments.of({})) for name in names)
    but_first_and_last = arguments.replace(first_last_layers_bf16=True)
    found = [number for number in range(4) if is_quantized(f"decoder.layers.{number}.{plain[1]}", but_first_and_last)]
    assert found == []
    layers = [f"decoder.layers.{number}.mlp.linear_fc1.weight" for number in range(4)]
    assert [name for name in layers if is_quantized(name, but_first_and_last)] == layers[1:3]


class Interrupted:
    """An optimizer's masters, of which one cannot be looked at."""

    def __init__(self, masters: Mapping[str, torch.Tensor]) -> None:
        self._masters = masters

    def shards(self, live: Mapping[int, LiveParameter]) -> Iterator[LiveShard]:
        adapter: Any = self
        for known in live.values():
            if known.regions[0].name not in self._masters:
                raise UnsupportedCheckpointError("a master that is not its kind's")
            yield LiveShard(known, Slice.whole(known.regions), (), adapter)

    def master_check(self, shard: LiveShard) -> MasterCheck:
        return BY_ROUNDING

    def master(self, shard: LiveShard) -> torch.Tensor:
        return self._masters[shard.name]


@pytest.mark.parametrize("looked", [True, False])
@pytest.mark.parametrize("wrong", [None, 1, 6])
def test_masters_are_verified_whether_compared_while_reading_or_not(wrong: int | None, looked: bool) -> None:
    weight = torch.arange(8.0).to(torch.bfloat16)
    known = LiveParameter(weight, (Region.whole("weight", (8,)),), {}, may_pad=False)
    shard = LiveShard(known, Slice.whole(known.regions), (), cast("Any", None))
    master = weight.float()
    if wrong is not None:
        master[wrong] += 1.0
    checkpoint: Any = SimpleNamespace(
        files=SimpleNamespace(transfer=None, folder="here"),
        job=SimpleNamespace(master_check=BY_ROUNDING, arguments=lambda: JobArguments.of({})),
        optimizer=SimpleNamespace(masters_are_derived=lambda name: False), logical_tensor=lambda kind, name: None,
    )  # fmt: skip
    prover = live_check.Prover({shard: master}, checkpoint)
    if looked:
        prover.on_read(shard, 0, 4)
        prover.on_read(shard, 4, 8)
    with nullcontext() if wrong is None else pytest.raises(ProofError, match=f"weight, element {wrong} of"):
        prover.finish()
    if looked and wrong is None:  # they are not compared twice
        master.zero_()
        prover.finish()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("strided", [False, True])
def test_a_wrong_master_shows_in_every_place_of_every_stretch(dtype: torch.dtype, strided: bool) -> None:
    room = live_check._Room()
    for begin in (0, 1, 4):
        whole = torch.linspace(-3.0, 3.0, 32).to(dtype)
        weight = whole[begin : begin + 26 : 2] if strided else whole[begin : begin + 13]
        for start, stop in ((0, 0), (0, 1), (0, 8), (0, 13), (3, 9), (4, 13), (8, 12)):
            master = weight.float()
            assert live_check._Pair(master, weight).rounds(start, stop, room)
            for wrong in range(13):
                flipped = master.clone()
                flipped[wrong] *= 1.5
                pair = live_check._Pair(flipped, weight)
                assert pair.rounds(start, stop, room) == (not start <= wrong < stop or flipped[wrong] == 0)
    nothing = torch.empty(8, dtype=dtype)[::2][:0]
    assert live_check._Pair(nothing.float(), nothing).rounds(0, 0, room)


class Samples:
    """Parameters of one element each, in one bucket and beside it; which of them recovery asks for."""

    def __init__(self, wrong: int | None, mixed: bool) -> None:
        self.wrong, self.mixed, self.asked = wrong, mixed, list[int]()

    def master_check(self, names: Iterable[str]) -> MasterCheck:
        return BY_ROUNDING

    def master(self, group: OptimizerGroup, key: BucketKey, start: int, count: int) -> torch.Tensor:
        return torch.full((count,), float(start == self.wrong))

    def weight(self, regions: tuple[Region, ...], count: int) -> torch.Tensor:
        number = int(regions[0].name)
        self.asked.append(number)
        return torch.zeros(count, dtype=torch.float16 if self.mixed and number % 2 else torch.bfloat16)

    def read_ahead(self, group: OptimizerGroup, placed: Iterable[Placed]) -> Iterator[Placed]:
        return iter(placed)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("wrong", "asked"), [(0, 1), (1, 33), (32, 33), (33, 65), (69, 70), (None, 70)])
def test_samples_of_a_packing_are_compared_many_at_once(wrong: int | None, asked: int, mixed: bool) -> None:
    placed = [Placement(f"p{number}", (Region.whole(str(number), (1,)),), number) for number in range(70)]
    samples, group = Samples(wrong, mixed), cast("OptimizerGroup", None)
    found = packing_recovery._sample_mismatch(group, {BucketKey(0, "bf16", 0): placed}, samples)
    assert samples.asked == list(range(asked))
    assert found is None if wrong is None else f"p{wrong} would be master 1.0, weight 0.0" in str(found)


def test_a_failed_comparison_hides_no_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = torch.nn.ParameterDict({"first": torch.ones(4), "second": torch.ones(4)})
    monkeypatch.setattr(live_check, "live_parameters", lambda chunks: {})

    def found(first: float) -> list[str]:
        adapters = [Interrupted({"first": torch.full((4,), first)})]
        monkeypatch.setattr(live_check, "optimizer_adapters_of", lambda optimizer: adapters)
        return [item.name for item in live_check.live_mismatches([chunk], None)]

    assert found(2.0) == ["first"]
    with pytest.raises(UnsupportedCheckpointError, match="not its kind's"):
        found(1.0)


def test_an_unknown_optimizer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence would say that the load is proven."""
    said: list[str] = []
    monkeypatch.setattr(hooks_proof, "announce", lambda line, every_rank: said.append(f"{every_rank}: {line}"))
    optimizer = SimpleNamespace(optimizer=torch.optim.Adagrad([torch.ones(1, requires_grad=True)]))
    chunk = torch.nn.ParameterDict({"first": torch.ones(4)})
    hooks_proof.prove_loaded([chunk], optimizer, loaded=True, permitted=None)
    assert said == [
        "True: this load is not verified: rank 0: this version cannot check the optimizer: SimpleNamespace over Adagrad"
    ]
    hooks_proof.prove_loaded([chunk], optimizer, loaded=False, permitted=None)
    assert len(said) == 1
