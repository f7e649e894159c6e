"""Names the arguments in which the models of two jobs differ, for the errors of a resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mcore_ckpt_ext.errors import ModelMismatchError, UnsupportedCheckpointError, format_value, join_some
from mcore_ckpt_ext.job.arguments.model import ModelTable
from mcore_ckpt_ext.job.arguments.other import OtherTable
from mcore_ckpt_ext.job.arguments.row import NOTHING, Changes, rows_of
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.model_arguments import ModelArguments, complete, has_experts

SAME_MODEL = "resume with the model arguments that the checkpoint was written with"
"""The hint of errors about parameters that only one of the two models has, or with another shape."""

_ROWS = {name: row for name, row in rows_of(ModelTable, OtherTable).items() if row.effect is not NOTHING}


def differing_arguments(written: JobArguments, running: JobArguments) -> list[str]:
    """Return the model's arguments of both jobs that have different values: `num_layers 4, now 6`.

    An argument without effect in both jobs is left out, for example one of experts in dense models.
    """
    try:
        sources = [complete(job) for job in (written, running)]
    except UnsupportedCheckpointError:
        return []  # one of them is not fully described
    texts = []
    for name, row in _ROWS.items():
        before, now = (_value(source, name) for source in sources)
        conditions = row.effect.only_with if isinstance(row.effect, Changes) else ()
        has_effect = not conditions or any(
            condition.holds(source.get) for condition in conditions for source in sources
        )
        if name in written.raw and name in running.raw and before != now and has_effect:
            texts.append(f"{name} {format_value(before)}, now {format_value(now)}")
    return texts


def _value(source: ModelArguments, name: str) -> Any:
    """Return the value of an argument in one form, whatever release or script has written it.

    Since core_v0.12 Megatron sets `add_qkv_bias` with `add_bias_linear`, either of which gives these biases
    (`validate_args`, megatron/training/arguments.py, core_v0.12.1 to 0.19.2; `SelfAttention`, attention.py). Which
    layers have experts is stated as a number or as a list.
    """
    value = source.get(name)
    if name == "add_qkv_bias":
        return source.get("add_bias_linear") or value
    if name == "moe_layer_freq" and isinstance(value, int) and source.num_layers:
        return [int(has_experts(source, layer)) for layer in range(source.num_layers)] if source.num_experts else value
    return list(value) if isinstance(value, (list, tuple)) else value


@contextmanager
def naming_differences(written: JobArguments, running: JobArguments) -> Iterator[None]:
    """Within this scope, an error whose hint is `SAME_MODEL` names the arguments that differ.

    Args:
        written: the arguments of the job that wrote the checkpoint.
        running: the arguments of the job that resumes it.
    """
    try:
        yield
    except ModelMismatchError as error:
        differing = differing_arguments(written, running)
        if error.details.get("hint") != SAME_MODEL or not differing:
            raise
        raise ModelMismatchError(
            error.message,
            **{label: text for label, text in error.details.items() if label != "hint"},
            hint=f"{SAME_MODEL}; different: {join_some(differing)}",
        ) from error
