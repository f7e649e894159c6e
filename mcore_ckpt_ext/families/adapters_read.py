"""Maps the adapters of a PEFT folder to those of Megatron-Bridge.

If a Megatron linear layer consists of several Hugging Face layers, Bridge's LoRA and DoRA have one adapter with one
`lora_A`; CanonicalLoRA has one for each of them (peft/lora.py, dora.py, canonical_lora.py of megatron-bridge 0.6.2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, join_some
from mcore_ckpt_ext.families.adapters import MAGNITUDES, PREFIX, Adapters, Shapes, adapters_of, linears_of, shortest
from mcore_ckpt_ext.families.family import HuggingFaceTensor
from mcore_ckpt_ext.model_space.adapters import IN, MAGNITUDE, MARK, OUT, PARTS, targets_of


def adapters_read(
    base: Sequence[HuggingFaceTensor], shapes: Shapes, is_one: Callable[[Sequence[str]], bool]
) -> tuple[Adapters, Shapes]:
    """Return the adapters of a PEFT folder.

    Args:
        base: the tensors of the adapted model.
        shapes: shapes of the folder's tensors, by their names in PEFT.
        is_one: returns whether the tensors with some names have equal content.

    Returns:
        The adapters, and the shapes of their tensors by model-space names.

    Raises:
        UnsupportedCheckpointError: a tensor does not belong to an adapter of the model's linear layers.
    """
    ends = (".lora_A.weight", ".lora_B.weight")
    modules = [{name.removesuffix(end) for name in shapes if name.endswith(end)} for end in ends]
    if alone := sorted(modules[0] ^ modules[1]):
        raise UnsupportedCheckpointError("a linear has only one of lora_A and lora_B", where=alone[0])
    of_model = linears_of(base)
    linears = {
        name: adapted
        for name, ours in of_model.items()
        if (adapted := [tensor for tensor in ours if _lora_a(tensor) in shapes])
    }
    several = {name: of_model[name] for name in linears if len(of_model[name]) > 1}
    fused = all(
        linears[name] == ours and is_one([_lora_a(tensor) for tensor in ours]) for name, ours in several.items()
    )
    megatron_shapes: dict[str, tuple[int, ...]] = {}
    for name, ours in linears.items():
        if fused or name not in several:
            megatron_shapes |= _tensors(f"{name}{MARK}", ours, shapes)
            continue
        parts = PARTS.get(name.rpartition(".")[2], ())
        if len(parts) != len(several[name]):
            raise UnsupportedCheckpointError(
                "Megatron-Bridge has no adapters for the parts of this linear",
                found=join_some([tensor.name for tensor in ours]),
                expected="one lora_A for all of them",
                where=name,
            )
        for part, tensor in zip(parts, several[name], strict=True):
            megatron_shapes |= _tensors(f"{name}{MARK}{part}.", [tensor], shapes) if tensor in ours else {}
    adapters = adapters_of(base, megatron_shapes, 1)
    _check_names({tensor.name for tensor in adapters.tensors}, shapes)
    return adapters, megatron_shapes


def _check_names(expected: set[str], shapes: Shapes) -> None:
    if expected != shapes.keys():
        raise UnsupportedCheckpointError(
            "the folder's tensors do not match adapters of this model's linear layers",
            found="; ".join(
                [
                    *(f"unknown: {name}" for name in sorted(shapes.keys() - expected)[:4]),
                    *(f"missing: {name}" for name in sorted(expected - shapes.keys())[:4]),
                ]
            ),
            expected="lora_A and lora_B of linears of attention, dense MLPs and shared experts",
            hint="pass the model that they were trained for: --weights FOLDER, or --merge FOLDER; if that is the one, "
            "merge them with peft: PeftModel.merge_and_unload(), then save_pretrained",
        )


def _lora_a(tensor: HuggingFaceTensor) -> str:
    return f"{PREFIX}{tensor.name.removesuffix('.weight')}.lora_A.weight"


def _tensors(before: str, ours: Sequence[HuggingFaceTensor], shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of Bridge's tensors for an adapter that several linear layers share."""
    rank = shapes[_lora_a(ours[0])][0]
    rows = sum(tensor.shape[0] for tensor in ours)
    yield before + IN, (rank, ours[0].shape[1])
    yield before + OUT, (rows, rank)
    if f"{PREFIX}{ours[0].name.removesuffix('.weight')}.{MAGNITUDES}" in shapes:
        yield before + MAGNITUDE, (rows,)


def bridge_peft(
    base: Sequence[HuggingFaceTensor], names: Collection[str], rank: int, alpha: float, dropout: float
) -> dict[str, Any]:
    """Return the section `peft` of `run_config.yaml`.

    Args:
        base: the tensors of the model.
        names: model-space names of the adapters' tensors.
        rank: rank of all adapters.
        alpha: LoRA's alpha.
        dropout: dropout in training.

    Raises:
        UnsupportedCheckpointError: Megatron-Bridge has no such adapters.
    """
    parts: dict[str, set[str]] = {}
    for name in names:
        linear, _, rest = name.partition(MARK)
        parts.setdefault(linear, set()).add(rest.partition(".")[0] if rest.startswith("adapter_") else "")
    divided = {linear: used for linear, used in parts.items() if used != {""}}
    with_norms = {name.partition(MARK)[0] for name in names if name.endswith(MAGNITUDE)}
    lacking = [linear for linear, used in divided.items() if used != set(PARTS[linear.rpartition(".")[2]])]
    whole = [linear for linear in parts if divided and linear not in divided and linear.endswith((*PARTS,))]
    if with_norms and (divided or with_norms != parts.keys()):
        raise _not_bridge_s("DoRA of linears with different lora_A, or of some linears only", sorted(with_norms))
    if lacking or whole:  # `LoRALinearSplitQKV` and `LoRALinearSplitFC1UpGate` call each (canonical_lora.py)
        raise _not_bridge_s("CanonicalLoRA of a part of a linear only", lacking or whole)
    kind = "dora.DoRA" if with_norms else "canonical_lora.CanonicalLoRA" if divided else "lora.LoRA"
    chosen = shortest(set(parts), linears_of(base))
    targets = [target for name in chosen for target in (targets_of(name) if divided else (name,))]
    return {
        "_target_": f"megatron.bridge.peft.{kind}",
        "_call_": True,
        "target_modules": sorted(targets),
        "dim": rank,
        "alpha": alpha,
        "dropout": dropout,
    }


def _not_bridge_s(kind: str, names: Sequence[str]) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        "Megatron-Bridge has no such adapters",
        found=f"{kind}: {join_some(names, 2)}",
        expected="LoRA, DoRA or CanonicalLoRA of whole linears",
        hint="merge them into their model: --merge FOLDER --to hf",
    )
