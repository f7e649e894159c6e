"""Makes errors of this package instances of the framework's errors that they replace."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from mcore_ckpt_ext.errors import CheckpointError


def add_replaced_types(error: BaseException, replaced: Sequence[str]) -> None:
    """Make an error of this package an instance of the framework's error types, too; ignore other errors.

    Its class name and text stay the same: the new class is a subclass.

    Args:
        error: an error that leaves a wrapped function of a framework.
        replaced: the types that this function itself raises, as "module:class". Modules that are not imported are
            skipped, since no program can expect their errors.
    """
    if not isinstance(error, CheckpointError):
        return
    named = [text.partition(":") for text in replaced]
    kinds = [getattr(sys.modules.get(module), name, None) for module, _, name in named]
    missing = [kind for kind in kinds if isinstance(kind, type) and not isinstance(error, kind)]
    if missing:
        error.__class__ = _subclass(type(error), missing)
        if isinstance(error, CheckpointException):
            error._failures = getattr(error.__cause__, "failures", {})


def _subclass(error_type: type[CheckpointError], others: Sequence[type]) -> Any:
    """Make a subclass with the same name and text; instances are pickled as the base class."""
    return type(
        error_type.__name__,
        (error_type, *others),
        {
            "__module__": error_type.__module__,
            "__qualname__": error_type.__qualname__,
            "__doc__": error_type.__doc__,
            "__str__": error_type.__str__,
            "__reduce__": lambda self: (error_type, self.args),
        },
    )
