"""Compares the arguments of a job with the model in a `config.json`, before the job builds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, shorten
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.flags import arguments_without_flag
from mcore_ckpt_ext.job.arguments.without_effect import arguments_without_effect
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.model_arguments import ModelArguments, complete
from mcore_ckpt_ext.job.releases import PASSES_ON_INTERPOLATION

# The vocabulary may be padded, and MTP layers may be omitted; the load itself checks both.
_OF_THE_LOAD = ("vocab_size", "padded_vocab_size", "mtp_num_layers")


def contradictions(family: Family, model: ModelArguments, job: JobArguments) -> list[str]:
    """Return descriptions of a job's arguments that contradict a `config.json`.

    Args:
        family: family of the model.
        model: arguments for the `config.json` (`Family.arguments`).
        job: arguments of the running job, after Megatron's own validation.
    """
    running = complete(job)
    running = running.replace(vocab_size=model.vocab_size, mtp_num_layers=model.mtp_num_layers)
    descriptions = [
        *_differing_arguments(family, model, running),
        *family.mismatches(running),
        *_contradictions_without_flag(model, job),
    ]
    if family.bridge_only_reason:
        descriptions.insert(0, f"pretrain_gpt.py builds no such model: {family.bridge_only_reason}")
    return list(dict.fromkeys(descriptions))


def unwritten(family: Family, model: ModelArguments) -> list[str]:
    """Return descriptions of a model's arguments that differ after writing and reading its `config.json`.

    Raises:
        UnsupportedCheckpointError: the written `config.json` cannot be read.
    """
    return list(_differing_arguments(family, family.arguments(family.config(model)), model))


def _differing_arguments(family: Family, model: ModelArguments, running: ModelArguments) -> Iterator[str]:
    """Yield arguments of the job that change the `config.json` when they replace the model's.

    Different values may be equivalent, such as `moe_layer_freq` 1 and `[1, 1]`, or have no effect, such as
    `kv_channels` with latent attention. The family then writes the same `config.json` for them.
    """
    expressed = family.expressed
    for name in sorted(expressed - arguments_without_effect(expressed) - {*_OF_THE_LOAD, *_only_bounds(model)}):
        expected = model.get(name)
        given = running.get(name)
        if (expected or None) != (given or None) and _writes_another(family, model, name, given):
            yield f"{name} is {shorten(repr(given))}, not {shorten(repr(expected))}"


def _only_bounds(model: ModelArguments) -> tuple[str, ...]:
    """Return arguments that only limit the job: with computed positions, the largest sequence length."""
    return () if model.position_embedding_type == "learned_absolute" else ("max_position_embeddings",)


def _writes_another(family: Family, model: ModelArguments, name: str, value: Any) -> bool:
    try:
        change = {name: value}
        is_of_model = name in model.values
        changed = model.replace(**change) if is_of_model else replace(model, job=model.job.replace(**change))
        return family.config(changed) != family.config(model)
    except (UnsupportedCheckpointError, TypeError, ValueError, ArithmeticError):
        return True  # no model of the family can have this value


def _contradictions_without_flag(model: ModelArguments, job: JobArguments) -> Iterator[str]:
    for name, value in arguments_without_flag(model, since_0_19=PASSES_ON_INTERPOLATION.is_shown_by(job)).items():
        yield f"{name} should be {value!r}, which no flag that pretrain_gpt.py passes on says"
