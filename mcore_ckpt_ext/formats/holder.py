"""A checkpoint as the readers of optimizer state see it."""

from __future__ import annotations

from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.optimizers.optimizer_format import Holder


def holder_of(checkpoint: CheckpointView) -> Holder:
    """Return the checkpoint as the holder of its optimizer's state."""
    job = checkpoint.job
    return Holder(
        folder=checkpoint.files.folder,
        transfer=checkpoint.files.transfer,
        arguments=job.arguments(),
        weights=checkpoint.model.weights,
        models=job.models,
        sidecar=job.found_sidecar().sidecar,
        orders=job.orders,
    )
