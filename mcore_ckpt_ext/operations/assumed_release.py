"""The release of Megatron that a plan is for."""

from __future__ import annotations

from mcore_ckpt_ext.formats.target import is_installed, version_number
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.operations.resumptions import writer_of
from mcore_ckpt_ext.versions import KNOWN, Version, parse_version


def release_of(checkpoint: CheckpointView, requested: str | None) -> tuple[Version, str]:
    """Return the release that will run, and where it is from: stated, installed, or the checkpoint's."""
    if requested is not None:
        return version_number(requested), "as stated"
    if is_installed():
        return version_number(None), "installed"
    written = parse_version(writer_of(checkpoint).version)
    if written not in KNOWN:
        return version_number(None), "the newest known; none is installed"
    return written, "that of the checkpoint; none is installed"
