"""The public name of an open checkpoint."""

from mcore_ckpt_ext.formats.view import CheckpointView as Checkpoint

__all__ = ["Checkpoint"]
