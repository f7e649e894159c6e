"""Allocations on the test device that fail: at another place of the program each time, until none is left."""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable
from typing import Any

import torch

from tests.harness import device

PACKAGE = "mcore_ckpt_ext"
_FRAMEWORKS = ("megatron", "colossalai")


class Failure:
    """Lets an allocation of this package fail on the test device: at another place of the program each time.

    Attributes:
        place: where one has failed, from the innermost caller on; None if none has since it was set to None.
    """

    def __init__(self) -> None:
        self.place: tuple[str, ...] | None = None
        self._places: set[tuple[str, ...]] = set()

    def within(self, function: Callable[..., Any], *positional: Any, **keywords: Any) -> Any:
        """Call a function, during which an allocation fails."""
        device.BEFORE_ALLOCATION.append(self)
        try:
            return function(*positional, **keywords)
        finally:
            device.BEFORE_ALLOCATION.remove(self)

    def __call__(self, number: int, nbytes: int) -> None:
        frames = [(frame, line) for frame, line in traceback.walk_stack(None) if _owner(frame)]
        place = tuple(f"{frame.f_code.co_filename}:{line}" for frame, line in frames if _owner(frame) == PACKAGE)
        if not frames or _owner(frames[0][0]) != PACKAGE:
            return  # an allocation of the framework
        if self.place is None and place not in self._places:
            self.place = place
            self._places.add(place)
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes.")


def _owner(frame: types.FrameType) -> str:
    """Return the package of a frame, if it is this one or a framework; otherwise an empty string."""
    name = str(frame.f_globals["__name__"]).partition(".")[0]
    return name if name in (PACKAGE, *_FRAMEWORKS) else ""
