"""The pages of `--html`: one file each, nothing loaded from elsewhere, the data as JSON."""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt_ext.cli.output import json_text
from mcore_ckpt_ext.errors import DestinationError, UsageError

if TYPE_CHECKING:
    from mcore_ckpt_ext.operations.comparison_result import Comparison
    from mcore_ckpt_ext.operations.inspection import Inspection
    from mcore_ckpt_ext.operations.layout_plan import LayoutPlan
    from mcore_ckpt_ext.rehearsal.result import Rehearsal

_BEGINNING = b"<!doctype html>"
_DATA, _STYLE, _SCRIPT = "/*DATA*/", "/*STYLE*/", "/*SCRIPT*/"


def inspection_page(found: Inspection) -> str:
    """A page of everything that `inspect` knows."""
    data = asdict(found)
    # A tensor is in many files, and its name long: each name is there once, and files refer to it by number.
    numbers: dict[str, int] = {}
    for file in data["files"]:
        file["tensors"] = [numbers.setdefault(name, len(numbers)) for name in file["tensors"]]
    return _page("inspection.js", {**data, "names": list(numbers)})


def comparison_page(found: Comparison) -> str:
    """A page of what differs between two checkpoints, with a picture for each tensor."""
    return _page("comparison.js", asdict(found))


def plan_page(found: LayoutPlan | Rehearsal) -> str:
    """A page of the layouts that a checkpoint can be resumed under, or of a rehearsal."""
    return _page("plan.js", asdict(found))


def check_place(path: Path) -> None:
    """Refuse a place for a page where something else lies, before anything is looked at: it may be a checkpoint's.

    Raises:
        UsageError: there is such a thing.
    """
    if not os.path.lexists(path):
        return
    is_page = False
    if path.is_file():
        with path.open("rb") as stream:
            is_page = stream.read(len(_BEGINNING)).lower() == _BEGINNING
    if not is_page:
        raise UsageError(
            "--html would overwrite a file that is not an HTML page",
            where=str(path),
            hint="choose a new file, or an earlier page",
        )


def write_page(path: Path, text: str) -> None:
    """Write a page to a place that `check_place` has let pass.

    Raises:
        DestinationError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DestinationError(
            "the page cannot be written",
            found=error.strerror,
            where=str(path),
            hint="choose a file in an existing folder",
        ) from error


def _page(script: str, data: dict[str, Any]) -> str:
    """The text of a page. The scripts read the data with `JSON.parse` and show names as text, never as HTML."""
    text = _resource("page.html").replace(_STYLE, _resource("style.css"), 1)
    text = text.replace(_SCRIPT, _resource("shared.js") + _resource(script), 1)
    return text.replace(_DATA, embedded(json_text(data)), 1)


def _resource(name: str) -> str:
    return resources.files("mcore_ckpt_ext.cli").joinpath("pages").joinpath(name).read_text(encoding="utf-8")


def embedded(text: str) -> str:
    """JSON that can stand inside a `script` element: nothing in it can end that element or begin a comment."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
