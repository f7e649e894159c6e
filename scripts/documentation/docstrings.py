"""An extension of griffe, which reads docstrings for the documentation: `Example:` is a section of examples.

Its Google parser knows `Examples:` alone, and takes the former for prose, in which brackets are links.
"""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section while an object is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Take note of an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
