"""The release of the running Megatron Core."""

from __future__ import annotations

import sys

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.versions import Version, parse_version


def version_text() -> str:
    """Return the version of the imported megatron.core as it states it; "unknown" without one."""
    return str(getattr(sys.modules.get("megatron.core"), "__version__", "unknown"))


def megatron_version() -> Version:
    """Return the version of the imported megatron.core.

    Raises:
        UnsupportedCheckpointError: it has no valid version.
    """
    version = parse_version(version_text())
    if version is None:
        raise UnsupportedCheckpointError("the running Megatron Core has no version", found=version_text())
    return version
