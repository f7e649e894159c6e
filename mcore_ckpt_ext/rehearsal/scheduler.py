"""Megatron's learning rate scheduler of a simulated job, which compares options with stored ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.job.job_arguments import JobArguments

_COMPARED = {
    "lr": ("max_lr", "learning rate"),
    "min_lr": ("min_lr", "minimum learning rate"),
    "lr_decay_style": ("lr_decay_style", "learning rate decay style"),
    "start_weight_decay": ("start_wd", "start weight decay"),
    "end_weight_decay": ("end_wd", "end weight decay"),
    "weight_decay_incr_style": ("wd_incr_style", "weight decay incr style"),
}
_DECAYS = ("start_weight_decay", "end_weight_decay")


class SimulatedScheduler:
    """A scheduler that compares, and changes nothing.

    Source: `OptimizerParamScheduler._check_and_set` (megatron/core/optimizer_param_scheduler.py, core_v0.7.0 to 0.19.2
    and the development head of August 2026).
    """

    def __init__(self, running: JobArguments) -> None:
        """Args: the arguments of the job."""
        self._settings = running.raw

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Compare a stored state, as Megatron's scheduler does unless a flag selects one of the two.

        Raises:
            AssertionError: a value differs, as there.
        """
        settings = self._settings
        if settings.get("override_opt_param_scheduler") or settings.get("use_checkpoint_opt_param_scheduler"):
            return
        for name, (key, label) in _COMPARED.items():
            live = _decay(settings, name) if name in _DECAYS else settings.get(name)
            if live is not None and key in stored and live != stored[key]:
                raise AssertionError(f"another {label}, {live} instead of {stored[key]}")


def check_schedule(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Refuse learning rates and weight decays that no scheduler has.

    Source: the assertions of `OptimizerParamScheduler.__init__` (megatron/core/optimizer_param_scheduler.py) and of
    `validate_args` (megatron/training/arguments.py), core_v0.16.1, 0.19.2 and the development head of August 2026.

    Args:
        settings: the arguments of the job.
        changes: those that differ from the job that wrote the checkpoint.

    Raises:
        UsageError: one is below another, or below 0; or a constant weight decay has another start or end.
    """
    # `validate_args` sets both ends of a constant one, so that the arguments of a running job have them.
    ends = [name for name in _DECAYS if changes.get(name) not in (None, settings.get("weight_decay"))]
    if ends and _is_constant(settings):
        raise UsageError(
            "Megatron's weight decay is constant, without a start or an end",
            found=", ".join(ends),
            expected="weight_decay, or another weight_decay_incr_style",
            hint=f"for example --change weight_decay={changes[ends[0]]}",
        )
    start, end = (_decay(settings, name) for name in _DECAYS)
    pairs = (("min_lr", settings.get("min_lr") or 0.0, "lr", settings.get("lr")), (_DECAYS[0], start, _DECAYS[1], end))
    for low_name, low, high_name, high in pairs:
        if low is not None and high is not None and not 0 <= low <= high:
            raise UsageError(
                "Megatron's scheduler has no such bounds",
                found=f"{low_name} {low}, {high_name} {high}",
                expected=f"0 or more, and {low_name} at most {high_name}",
                hint="correct the values after --change",
            )


def _decay(settings: Mapping[str, Any], name: str) -> Any:
    """Return the weight decay at the start or end; one argument gives a constant one (`validate_args`)."""
    return settings.get("weight_decay" if _is_constant(settings) else name)


def _is_constant(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("weight_decay_incr_style", "constant") == "constant")
