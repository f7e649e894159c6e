"""Whether the arguments of a job describe the model that a `config.json` describes, before the job builds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.flags import unsaid
from mcore_ckpt_ext.job.arguments.without_effect import without_effect
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.model_arguments import ModelArguments, complete
from mcore_ckpt_ext.job.releases import PASSES_ON_INTERPOLATION

# The vocabulary may be padded, and MTP layers left out: the load itself looks at both.
_OF_THE_LOAD = ("vocab_size", "padded_vocab_size", "mtp_num_layers")


def contradictions(family: Family, model: ModelArguments, job: JobArguments) -> list[str]:
    """The arguments of a job by which its model is another than that of a `config.json`, in words.

    Args:
        family: of the model.
        model: what the `config.json` means (`Family.arguments`).
        job: the arguments of the running job, after Megatron's own validation.
    """
    running = complete(job)
    running = running.replace(vocab_size=model.vocab_size, mtp_num_layers=model.mtp_num_layers)
    found = [*_differing(family, model, running), *family.mismatches(running), *_of_no_flag(model, job)]
    if family.bridge_only_reason:
        found.insert(0, f"pretrain_gpt.py builds no such model: {family.bridge_only_reason}")
    return list(dict.fromkeys(found))


def unwritten(family: Family, model: ModelArguments) -> list[str]:
    """The arguments of a model that its own `config.json` does not give back, in words.

    Raises:
        UnsupportedCheckpointError: it cannot be read at all.
    """
    return list(_differing(family, family.arguments(family.config(model)), model))


def _differing(family: Family, model: ModelArguments, running: ModelArguments) -> Iterator[str]:
    """The arguments that make another `config.json` when they alone are the job's.

    Two values may mean the same, as `moe_layer_freq` 1 and `[1, 1]` do, or nothing at all, as `kv_channels` with latent
    attention: that shows in what the family writes for them.
    """
    expressed = family.expressed
    for name in sorted(expressed - without_effect(expressed) - {*_OF_THE_LOAD, *_only_bounds(model)}):
        wanted, given = model.get(name), running.get(name)
        if (wanted or None) != (given or None) and _writes_another(family, model, name, given):
            yield f"{name} is {given!r}, not {wanted!r}"


def _only_bounds(model: ModelArguments) -> tuple[str, ...]:
    """Where positions are computed, their greatest number is what the job may see, not what the model is."""
    return () if model.position_embedding_type == "learned_absolute" else ("max_position_embeddings",)


def _writes_another(family: Family, model: ModelArguments, name: str, value: Any) -> bool:
    try:
        change = {name: value}
        is_of_model = name in model.values
        changed = model.replace(**change) if is_of_model else replace(model, job=model.job.replace(**change))
        return family.config(changed) != family.config(model)
    except (UnsupportedCheckpointError, TypeError, ValueError, ArithmeticError):
        return True  # no model of the family has that value


def _of_no_flag(model: ModelArguments, job: JobArguments) -> Iterator[str]:
    for name, value in unsaid(model, since_0_19=PASSES_ON_INTERPOLATION.is_shown_by(job)).items():
        yield f"{name} should be {value!r}, which no flag that pretrain_gpt.py passes on says"
