"""Megatron's learning rate scheduler of a simulated job, which compares options with stored ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
            live = self._decay(name) if name in _DECAYS else settings.get(name)
            if live is not None and key in stored and live != stored[key]:
                raise AssertionError(f"another {label}, {live} instead of {stored[key]}")

    def _decay(self, name: str) -> Any:
        """Return the weight decay at the start or end; one argument gives a constant one (`validate_args`)."""
        is_constant = self._settings.get("weight_decay_incr_style", "constant") == "constant"
        return self._settings.get("weight_decay" if is_constant else name)
