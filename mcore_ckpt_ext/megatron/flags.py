"""Make Megatron's ``--async-save`` really asynchronous, and accept this package's own flags.

Two defaults prevent an asynchronous save:

- since 0.16.0, ``validate_args`` switches ``--async-save`` off, with a warning, unless
  ``--use-persistent-ckpt-worker`` is given too (megatron/training/arguments.py:1138@0.16.1, 1740@0.19.2).
  Up to 0.15 an asynchronous save needs no such flag, so these versions are left alone;
- since 0.17.0, ``--async-strategy`` defaults to ``nvrx``, and the job fails in ``get_async_strategy``
  if nvidia-resiliency-ext is absent or too old
  (megatron/core/dist_checkpointing/strategies/torch.py:1127@0.19.2).

A flag that the user gave is never changed. The changes are made right after ``parse_args``: 0.16.x chooses
the writer's queue before it calls ``validate_args`` (megatron/training/initialize.py:86-92@0.16.1).
"""

from __future__ import annotations

import inspect
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.job.releases import NEEDS_PERSISTENT_WORKER
from mcore_ckpt_ext.megatron.data_index import record_data_files
from mcore_ckpt_ext.megatron.huggingface_export import check_export
from mcore_ckpt_ext.megatron.running_version import version_text
from mcore_ckpt_ext.megatron.sources.huggingface import check_arguments
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.settings import (
    ACCEPT_KEYS,
    AUTO,
    AUTO_BATCH,
    CONTINUE,
    DATA_ORDER,
    EXPORT_HF,
    FALLBACK,
    FAST,
    FROM_HF,
    LAYOUT,
    LOAD,
    OF_FLAGS,
    OF_ITERATION,
    ON_SAVE_FAILURE,
    RANDOM_STATES,
    READ_ONCE,
    REQUIRED,
    STOCK,
    STOP,
    WARN,
    Setting,
    invalid_settings,
)
from mcore_ckpt_ext.versions import parse_version

P = ParamSpec("P")
Arguments = TypeVar("Arguments", bound=Namespace)

_PROVIDER = "extra_args_provider"


@dataclass(frozen=True)
class Change:
    """An argument that is set to a value other than Megatron's default, and the reason."""

    name: str
    value: object
    reason: str


def wrap_parse_args(original: Callable[P, Arguments]) -> Callable[P, Arguments]:
    """Return a ``parse_args`` that enables asynchronous saves if the user passes ``--async-save``."""
    signature = inspect.signature(original)

    @wraps(original)
    def parse_args(*args: P.args, **kwargs: P.kwargs) -> Arguments:
        call = signature.bind(*args, **kwargs)
        call.arguments[_PROVIDER] = _with_own_flags(call.arguments.get(_PROVIDER))
        arguments = original(*call.args, **call.kwargs)
        version = parse_version(version_text())
        changes = asynchronous_save_changes(arguments, sys.argv[1:], version, nvrx_problem)
        for change in changes:
            setattr(arguments, change.name, change.value)
        if changes:
            changed = "; ".join(f"{change.name} = {change.value} ({change.reason})" for change in changes)
            announce(f"--async-save: {changed}")
        if hazard := offload_hazard(arguments, version):
            announce(f"--async-save: {hazard}")
        return arguments

    return parse_args


def wrap_validate_args(original: Callable[..., Arguments]) -> Callable[..., Arguments]:
    """Return a ``validate_args`` that may set the layout, and refuses a job which cannot begin or save."""

    @wraps(original)
    def validate_args(args: Arguments, *positional: object, **keywords: object) -> Arguments:
        check_settings()
        if LAYOUT.choose(args) != OF_FLAGS:
            import_module("mcore_ckpt_ext.megatron.elastic.layout").apply_layout(args)
        result = original(args, *positional, **keywords)
        check_arguments(args)
        check_export(args)
        record_data_files(args)
        return result

    return validate_args


def check_settings() -> None:
    """Refuse invalid values of variables: the setting that the user wanted would silently not apply.

    Raises:
        UsageError: a variable has an invalid value.
    """
    if wrong := invalid_settings():
        raise UsageError(
            "an environment variable has an invalid value",
            found="; ".join(f"{setting.name}={setting.text}" for setting in wrong),
            expected="; ".join(f"{setting.name}: {setting.meaning}" for setting in wrong),
            hint="correct it, or unset it; to list all of them: mcore-ckpt doctor --all",
        )


# Megatron has none of these names; each sets the setting of that name.
_FLAGS: Mapping[Setting[Any], Mapping[str, Any]] = MappingProxyType(
    {
        ON_SAVE_FAILURE: {
            "choices": [CONTINUE, STOP],
            "help": "Whether training goes on when a checkpoint cannot be saved "
            f"(default: {ON_SAVE_FAILURE.name}, or {ON_SAVE_FAILURE.default}).",
        },
        FALLBACK: {
            "action": "store_true",
            "default": None,
            "help": "Resume from the newest complete checkpoint where the newest one is incomplete or damaged "
            f"(also {FALLBACK.name}=1).",
        },
        DATA_ORDER: {
            "choices": [WARN, REQUIRED],
            "help": "What to do if the data does not go on where the checkpoint's job stopped, in the same order, or "
            f"that is unknown: log a line, or refuse to resume (default: {DATA_ORDER.name}, or {DATA_ORDER.default}).",
        },
        RANDOM_STATES: {
            "choices": [OF_ITERATION, STOCK],
            "help": "Where random states begin if tensor or pipeline parallel size has changed: at a seed that depends "
            f"on the iteration, or at --seed, as in Megatron (stock; default: {RANDOM_STATES.name}, or "
            f"{RANDOM_STATES.default}).",
        },
        LOAD: {
            "choices": [AUTO, STOCK, FAST],
            "help": "Which loader reads the tensors of a torch_dist checkpoint: this package (fast), Megatron if it "
            f"can (stock), this package under another layout (auto; default: {LOAD.name}, or {LOAD.default}).",
        },
        LAYOUT: {
            "choices": [OF_FLAGS, AUTO, AUTO_BATCH],
            "help": "If the job's flags do not fit the number of GPUs, choose a layout that keeps the training (auto), "
            f"or one with another global batch if that uses more of them (auto-batch; default: {LAYOUT.name}, or "
            f"{LAYOUT.default}).",
        },
        READ_ONCE: {
            "action": "store_true",
            "default": None,
            "help": "If this package reads the tensors, read data that several ranks need on one of them, and send it "
            f"to the others (also {READ_ONCE.name}=1).",
        },
        FROM_HF: {
            "action": "store_true",
            "default": None,
            "help": "Refuse a job unless --load (or --pretrained-checkpoint) names a Hugging Face folder to start "
            f"from; without this flag, a job starts from such a folder if it gets one (also {FROM_HF.name}=1).",
        },
        ACCEPT_KEYS: {
            "type": ACCEPT_KEYS.parse,
            "metavar": "NAMES",
            "help": "Keys of the config.json of a Hugging Face folder to start from, separated by commas, that have no "
            f"effect on what the model computes (also {ACCEPT_KEYS.name}).",
        },
        EXPORT_HF: {
            "type": int,
            "metavar": "EVERY",
            "help": "With the checkpoint of every EVERY-th iteration, also write a Hugging Face folder in the "
            f"background: hf/iter_... in the folder of --save (also {EXPORT_HF.name}).",
        },
    }
)


def _with_own_flags(provider: Callable[[ArgumentParser], ArgumentParser] | None) -> Callable[..., ArgumentParser]:
    """Return the user's provider of extra arguments, extended by this package's arguments."""

    def provide(parser: ArgumentParser) -> ArgumentParser:
        parser = provider(parser) if provider is not None else parser
        group = parser.add_argument_group(title="mcore_ckpt_ext")
        for setting, properties in _FLAGS.items():
            group.add_argument(setting.flag, **properties)
        return parser

    return provide


def asynchronous_save_changes(
    arguments: Namespace,
    command_line: Sequence[str],
    version: tuple[int, int] | None,
    find_nvrx_problem: Callable[[], str | None],
) -> list[Change]:
    """Decide which arguments must change so that ``--async-save`` saves asynchronously; change nothing.

    Args:
        arguments: the result of Megatron's ``parse_args``.
        command_line: the words that the user gave, to distinguish a given flag from a default.
        version: (major, minor) of megatron.core, or None if it is unknown.
        find_nvrx_problem: returns why the nvrx strategy cannot work, or None if it can. It imports the package, so it
            is called only if the result matters.
    """
    if not _saves_asynchronously(arguments) or version is None or not NEEDS_PERSISTENT_WORKER.is_of(version):
        return []
    if not arguments.use_persistent_ckpt_worker and offload_hazard(arguments, version):
        return []
    changes = []
    if getattr(arguments, "async_strategy", None) == "nvrx":
        problem = find_nvrx_problem()
        if problem and _is_given("--async-strategy", command_line):
            # Stock saves synchronously, or reports what to install. With the worker the job would only fail sooner.
            return []
        if problem:
            changes.append(Change("async_strategy", "mcore", f"nvrx cannot be used: {problem}"))
    if not arguments.use_persistent_ckpt_worker:
        reason = f"without it Megatron {version[0]}.{version[1]} switches --async-save off"
        changes.append(Change("use_persistent_ckpt_worker", True, reason))
    return changes


def offload_hazard(arguments: Namespace, version: tuple[int, int] | None) -> str | None:
    """Return why this job's persistent writer can damage its checkpoints; None if it cannot.

    The writer copies tensors from a GPU before training continues, and reads tensors on the CPU later, in place:
    masters and moments of an offloaded optimizer, which ``DistributedOptimizer`` passes without a copy
    (``_get_main_param_and_optimizer_states``, megatron/core/optimizer/distrib_optimizer.py, and ``preload_tensors``,
    filesystem_async.py of megatron-core 0.19.2 and of nvidia-resiliency-ext 0.6.0). Seen with the latter and tensors on
    the CPU: weights of one step with masters of a later one.
    """
    if not (_saves_asynchronously(arguments) and getattr(arguments, "optimizer_cpu_offload", False)):
        return None
    danger = "a persistent writer reads what --optimizer-cpu-offload keeps on the CPU while training changes it"
    if arguments.use_persistent_ckpt_worker:
        return f"{danger}: checkpoints can be a mixture of steps; leave --use-persistent-ckpt-worker out"
    if version is None or not NEEDS_PERSISTENT_WORKER.is_of(version):
        return None  # a process forked for each save has a copy of the memory
    return f"{danger}, so it is not switched on, and Megatron saves synchronously"


def _saves_asynchronously(arguments: Namespace) -> bool:
    """Return True if this job requests asynchronous saves in a format that supports them.

    Asynchronous saving works with torch_dist only (help of --async-save, 0.7.0 to 0.19.2). A job that is set up by
    a YAML file is left alone: ``validate_yaml`` does not switch ``async_save`` off.
    """
    return (
        bool(getattr(arguments, "async_save", False))
        and hasattr(arguments, "use_persistent_ckpt_worker")
        and getattr(arguments, "save", None) is not None
        and getattr(arguments, "ckpt_format", None) == "torch_dist"
        and getattr(arguments, "yaml_cfg", None) is None
    )


def _is_given(flag: str, command_line: Sequence[str]) -> bool:
    """Return True if the user gave a flag; Megatron's parser takes no abbreviations (allow_abbrev=False)."""
    return any(word == flag or word.startswith(f"{flag}=") for word in command_line)


def nvrx_problem() -> str | None:
    """Return why Megatron's nvrx strategy would fail in this environment; None if it works.

    It checks what Megatron checks: the imports of ``get_async_strategy`` (0.17.0 on), then the parameter
    ``mp_mode`` of ``get_write_results_queue``, which ``init_persistent_async_worker`` requires (0.18.0 on,
    megatron/training/async_utils.py:98@0.19.2). With a release below Megatron's minimum, the import of
    megatron.core itself fails (nvrx.py:has_nvrx_async_support@0.18.0 on), long before this.
    """
    try:
        strategies = import_module("megatron.core.dist_checkpointing.strategies.torch")
        _, functions = strategies.get_async_strategy("nvrx")
        parameters = inspect.signature(functions["get_write_results_queue"]).parameters
    except (ImportError, AttributeError, AssertionError, KeyError, ValueError) as error:
        return str(error.__cause__ or error.__context__ or error)
    if "mp_mode" not in parameters:
        return "nvidia_resiliency_ext is too old: get_write_results_queue has no parameter mp_mode"
    return None
