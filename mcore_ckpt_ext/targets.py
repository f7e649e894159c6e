"""The formats that a conversion can write, by their names for `mcore-ckpt convert --to`."""

from __future__ import annotations

from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.formats.registry import FORMATS
from mcore_ckpt_ext.formats.target import Target, is_target

__all__ = ["TARGETS", "Target", "target_of"]

TARGETS: dict[str, type[Target]] = {
    candidate.target.name: candidate.target for candidate in FORMATS if candidate.target is not None
}
"""The class of options for each format that this package writes."""


def target_of(target: object) -> Target:
    """Return the options of the format to write, which a caller passes by themselves or by its name.

    Raises:
        UsageError: no format has this name.
        TypeError: it is something else.
    """
    if is_target(target):
        return target
    options = " or ".join(f"{kind.__name__}()" for kind in TARGETS.values())
    if not isinstance(target, str):
        given = target.__name__ if isinstance(target, type) else type(target).__name__
        raise TypeError(f"the target of a conversion is {options}, or a name: {', '.join(TARGETS)}; not {given}")
    if target not in TARGETS:
        raise UsageError("no format has this name", found=target, expected=f"{', '.join(TARGETS)}; or {options}")
    return TARGETS[target]()
