"""Methods that replace those of ColossalAI's classes, either by a patch or in a subclass.

The original of a method stays in the class under its name with the prefix ``_non_strict_``, such as
``_non_strict_state_dict``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

ORIGINAL = "_non_strict_"
Function = TypeVar("Function", bound=Callable[..., Any])


class ReplacedMethods:
    """Methods that replace those of a class of ColossalAI, which are called with the same parameters."""

    if TYPE_CHECKING:
        # The other attributes of that class, originals of the methods included.
        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def namespace(cls, base: type) -> dict[str, Any]:
        """Return the attributes for a class: these methods, and its own under their second names."""
        ours = {name: value for name, value in vars(cls).items() if not name.startswith("__")}
        replaced = [name for name, value in ours.items() if callable(value) and hasattr(base, name)]
        return ours | {f"{ORIGINAL}{name}": _original(base, name) for name in replaced}


def keeps_signature(function: Function) -> Function:
    """Mark a function that is called with the parameters of a framework's function, for which it stands."""
    return function


def _original(base: type, name: str) -> Any:
    """Return a method of a class as ColossalAI wrote it, patched or not."""
    return getattr(base, f"{ORIGINAL}{name}", None) or getattr(base, name)
