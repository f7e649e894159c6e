"""An extension of griffe, which parses docstrings for the documentation: it supports `Example:`.

Griffe's Google parser only supports `Examples:`, and treats `Example:` as prose, in which brackets are links.
"""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section while an object is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
