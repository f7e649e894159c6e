"""The factor that adapters are multiplied by, which is not stored in a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError
from mcore_ckpt_ext.formats.description import run_config_of
from mcore_ckpt_ext.formats.hugging_face.folder import ADAPTER, is_peft
from mcore_ckpt_ext.formats.view import CheckpointView


@dataclass(frozen=True)
class Scaling:
    """Alpha divided by the rank, or by its square root if `by_root` (rsLoRA); and training's dropout."""

    alpha: float
    by_root: bool = False
    dropout: float = 0.0

    def scaling_of_rank(self, rank: int) -> float:
        """Return the factor for the product of the two matrices of an adapter of this rank."""
        return self.alpha / (sqrt(rank) if self.by_root else rank)


def scaling_of(checkpoint: CheckpointView, alpha: float | None) -> Scaling:
    """Return the scaling of a checkpoint's adapters; `alpha` is the user's value.

    Raises:
        UsageError: the user's alpha differs from the stored one.
        UnsupportedCheckpointError: alpha is neither stored nor passed, or it is zero or not a finite number.
    """
    settings: Mapping[str, Any] = (run_config_of(checkpoint.files.folder) or {}).get("peft") or {}
    args = checkpoint.job.arguments().raw
    stored = settings["alpha"] if settings.get("alpha") is not None else args.get("lora_alpha")
    if alpha is not None and stored is not None and alpha != stored:
        raise UsageError(
            "the checkpoint stores the alpha of its adapters",
            found=f"--lora-alpha {alpha}",
            expected=f"alpha {stored}",
            where=str(checkpoint.files.folder),
            hint="leave the option out",
        )
    effective_alpha = alpha if stored is None else stored
    if (
        isinstance(effective_alpha, bool)
        or not isinstance(effective_alpha, (int, float))
        or not isfinite(effective_alpha)
        or effective_alpha == 0
    ):
        raise UnsupportedCheckpointError(
            "the alpha of the adapters is missing or invalid",
            found="no alpha in the checkpoint" if effective_alpha is None else f"alpha: {effective_alpha!r}",
            expected="a number, not 0",
            where=str(checkpoint.files.folder),
            hint=f"set lora_alpha in {ADAPTER}"
            if is_peft(checkpoint.files.folder)
            else "pass the one used in training: --to hf --lora-alpha N",
        )
    dropout = settings.get("dropout", args.get("lora_dropout"))
    return Scaling(
        effective_alpha, bool(args.get("use_rslora")), float(dropout) if isinstance(dropout, (int, float)) else 0.0
    )
