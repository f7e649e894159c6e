"""The page of `inspect --html`: one file, nothing loaded from elsewhere, the data embedded as JSON."""

from __future__ import annotations

from dataclasses import asdict
from importlib import resources

from mcore_ckpt_ext.cli.output import json_text
from mcore_ckpt_ext.offline.inspection import Inspection

_PLACE = "/*DATA*/"


def page(found: Inspection) -> str:
    """The page's text. The script reads the data with `JSON.parse` and shows names as text, never as HTML."""
    template = resources.files("mcore_ckpt_ext.cli").joinpath("page.html").read_text(encoding="utf-8")
    return template.replace(_PLACE, embedded(json_text(asdict(found))), 1)


def embedded(text: str) -> str:
    """JSON that can stand inside a `script` element: nothing in it can end that element or begin a comment."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
