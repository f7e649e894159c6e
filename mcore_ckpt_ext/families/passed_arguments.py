"""Checks the arguments that a user passes, and compares them with the stored ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import chain
from typing import Any

from mcore_ckpt_ext.errors import UsageError, format_value
from mcore_ckpt_ext.families.forward_pass import classified_arguments
from mcore_ckpt_ext.job.arguments.flag_words import stored_argument
from mcore_ckpt_ext.job.arguments.table import ROWS
from mcore_ckpt_ext.job.dimensions import SIZE_ARGUMENTS
from mcore_ckpt_ext.job.job_arguments import JobArguments, format_untrusted, invalid_values
from mcore_ckpt_ext.job.model_arguments import FORMER_NAMES
from mcore_ckpt_ext.storage.enum_members import as_passed

_WORDS: Mapping[str, tuple[str, ...]] = {
    "attention_backend": ("flash", "fused", "unfused", "local", "auto"),
    "fp8": ("e4m3", "hybrid"),
    "fp4": ("e2m1",),
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
    "recompute_modules": (
        "core_attn",
        "moe_act",
        "layernorm",
        "mla_up_proj",
        "mlp",
        "moe",
        "shared_experts",
        "gdn_norm_out",
        "gdp_in_proj",
        "gdp_qkv",
        "mhc",
    ),
    "cross_entropy_fusion_impl": ("native", "te"),
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "weight_decay_incr_style": ("constant", "linear", "cosine"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "fp16", "bf16", "fp8"),
    "exp_avg_sq_dtype": ("fp32", "fp16", "bf16", "fp8"),
}
"""The words that an argument of the estimate of memory or of a rehearsal may have, or each item of its list.

Sources: `AttnBackend` (megatron/core/transformer/enums.py), `TransformerConfig` (transformer_config.py),
`ModelParallelConfig` and the parser (megatron/training/arguments.py), core_v0.16.1, 0.19.2 and the development head of
August 2026.
"""


def _unknown_words(passed: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the arguments with a word that Megatron refuses, each with the words that it accepts."""
    for name in passed.keys() & _WORDS.keys():
        value = as_passed(passed[name])
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not set(map(str, items)) <= {*_WORDS[name]}:
            yield name, ", ".join(_WORDS[name])


def check_passed(passed: Mapping[str, Any], where: str | None = None) -> None:
    """Refuse arguments that a user passes and that Megatron does not have, or not with such a value.

    Args:
        passed: the arguments.
        where: the checkpoint and the command's options, for the error.

    Raises:
        UsageError: names the first one, and a similar one that Megatron has, or what its value may be.
    """
    for name in sorted(passed):
        if stored := stored_argument(name):
            raise UsageError(
                "Megatron stores this argument under another name",
                found=name,
                expected=stored,
                hint=f"write {stored if '=' in stored else f'{stored}={passed[name]}'}",
            )
    for name, former in FORMER_NAMES.items():
        if name in passed and former in passed:
            raise UsageError(
                "an argument is passed under two names", found=f"{former} and {name}", hint="leave one out"
            )
    for name in sorted(passed.keys() - classified_arguments(passed)):
        similar = get_close_matches(name, ROWS, n=1)
        raise UsageError(
            "Megatron has no such argument",
            found=name,
            expected="as Megatron's arguments are stored: with underscores, and by their destination",
            hint=f"did you mean {similar[0]}?" if similar else "correct the name after --argument",
        )
    check_values(passed, "--argument", where)


def check_values(passed: Mapping[str, Any], option: str, where: str | None = None) -> None:
    """Refuse values that no job can have.

    Args:
        passed: the arguments that a user passes.
        option: the option of the command line that takes them.
        where: see `check_passed`.

    Raises:
        UsageError: names the first such argument, and what its value may be.
    """
    for name, expected in chain(invalid_values(passed), _unknown_words(passed)):
        raise UsageError(
            "an argument has a value that no job can have",
            found=f"{name}: {format_untrusted(passed[name])}",
            expected=expected,
            where=where,
            hint=f"correct the value after {option}",
        )


def with_passed(stored: JobArguments, passed: Mapping[str, Any], where: str | None = None) -> JobArguments:
    """Return the arguments of a checkpoint's job with those that a user passes, which take precedence.

    Args:
        stored: the arguments that the checkpoint stores.
        passed: the arguments that the user passes.
        where: the checkpoint and the command's options, for errors.

    Raises:
        UsageError: Megatron has no such argument, or not with such a value; or the checkpoint stores another layout of
            its job, by which its content is found.
    """
    check_passed(passed, where)
    passed = _under_stored_names(stored, passed)
    for name in sorted(set(SIZE_ARGUMENTS.values()) & _contradicting_arguments(stored, passed)):
        if stored.raw[name] is not None:
            raise UsageError(
                "an argument contradicts the layout of the job that wrote the checkpoint",
                found=f"{name}: {format_untrusted(passed[name])}",
                expected=f"{format_untrusted(stored.raw[name])}, as the checkpoint stores it",
                where=where,
                hint="leave it out",
            )
    return stored.replace(source=where, **passed) if passed else stored


def replaced_values(stored: JobArguments, passed: Mapping[str, Any]) -> tuple[str, ...]:
    """Describe the arguments that a user passes although the checkpoint stores another value."""
    passed = _under_stored_names(stored, passed)
    stored_values = {name: as_passed(stored.raw[name]) for name in sorted(_contradicting_arguments(stored, passed))}
    return tuple(
        f"{name} is {format_value(passed[name])}, as passed; the checkpoint stores {format_value(value)}"
        for name, value in stored_values.items()
    )


def _under_stored_names(stored: JobArguments, passed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a user passes, under the names that the checkpoint stores."""
    renamed = {
        passed_name: stored_name
        for names in FORMER_NAMES.items()
        for passed_name, stored_name in (names, reversed(names))
        if stored.is_set(stored_name) and not stored.is_set(passed_name)
    }
    return {renamed.get(name, name): value for name, value in passed.items()}


def _contradicting_arguments(stored: JobArguments, passed: Mapping[str, Any]) -> set[str]:
    return {name for name in passed if stored.is_set(name) and as_passed(passed[name]) != as_passed(stored.raw[name])}
