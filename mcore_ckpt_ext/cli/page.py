"""The pages of `--html`: each is one self-contained file with its data as JSON."""

from __future__ import annotations

import time
from dataclasses import asdict
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt_ext import __version__
from mcore_ckpt_ext.cli.output import json_text
from mcore_ckpt_ext.cli.shown_plan import shown_plan, shown_rehearsal
from mcore_ckpt_ext.storage.atomic_files import check_report, write_report

if TYPE_CHECKING:
    from mcore_ckpt_ext.operations.check_results import VerificationResult
    from mcore_ckpt_ext.operations.comparison_result import Comparison
    from mcore_ckpt_ext.operations.inspection_result import Inspection
    from mcore_ckpt_ext.operations.layout_plan import LayoutPlan
    from mcore_ckpt_ext.rehearsal.result import Rehearsal

_BEGINNING = b"<!doctype html>"
_PAGE = "the page"
_DATA = "/*DATA*/"
_STYLE = "/*STYLE*/"
_SCRIPT = "/*SCRIPT*/"
_TITLE = "<title>mcore-ckpt</title>"
_NAMED_BY = 2  # parts of a path: the run's folder and the iteration's


def inspection_page(inspection: Inspection) -> str:
    """Return a page with the result of `inspect`."""
    data = asdict(inspection)
    # A tensor may be in many files, and its name is long: each name is stored once, and files refer to it by number.
    numbers: dict[str, int] = {}
    for file in data["files"]:
        file["tensors"] = [numbers.setdefault(name, len(numbers)) for name in file["tensors"]]
    return _page("inspection.js", "inspect", [inspection.path], {**data, "names": list(numbers)})


def comparison_page(comparison: Comparison, verdict: str) -> str:
    """Return a page with the differences between two checkpoints, with a picture for each tensor."""
    return _page("comparison.js", "diff", [comparison.a, comparison.b], {**asdict(comparison), "verdict": verdict})


def plan_page(plan: LayoutPlan) -> str:
    """Return a page with the layouts that can resume a checkpoint."""
    return _page("plan.js", "plan", [plan.path], {**asdict(plan), "shown": asdict(shown_plan(plan))})


def rehearsal_page(rehearsal: Rehearsal) -> str:
    """Return a page with a rehearsal."""
    shown = asdict(shown_rehearsal(rehearsal))
    return _page("rehearsal.js", "plan", [rehearsal.path], {**asdict(rehearsal), "shown": shown})


def verification_page(result: VerificationResult, verdict: str) -> str:
    """Return a page with the checks of a checkpoint and their findings."""
    return _page("verification.js", "verify", [result.path], {**asdict(result), "verdict": verdict})


def check_page_file(path: Path) -> None:
    """Check, before anything is read, that a page may be written to a path.

    Raises:
        UsageError: the path exists and is not an HTML page, or its folder does not exist.
    """
    check_report(
        path,
        _is_page,
        what=_PAGE,
        conflict="--html would overwrite a file that is not an HTML page",
        earlier="an earlier page",
    )


def _is_page(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(_BEGINNING)).lower() == _BEGINNING


def write_page(path: Path, text: str) -> None:
    """Write a page atomically to a path that `check_page_file` has accepted.

    Raises:
        DestinationError: the page cannot be written.
    """
    write_report(path, text, what=_PAGE)


def _page(script: str, command: str, paths: list[str], data: dict[str, Any]) -> str:
    """Return the text of a page.

    Scripts read data with `JSON.parse` and show names as text, never as HTML.

    Args:
        script: the file that shows the data.
        command: the command that made them.
        paths: the checkpoints, which the page's title names.
        data: the result.
    """
    runs = [_name_of(path) for path in paths]
    made = time.strftime(f"mcore-ckpt {command} {__version__}, %Y-%m-%d %H:%M UTC", time.gmtime())
    text = _resource("page.html").replace(_STYLE, _resource("style.css"), 1)
    text = text.replace(_TITLE, f"<title>{escape(' and '.join(runs))} - mcore-ckpt {command}</title>", 1)
    text = text.replace(_SCRIPT, _resource("shared.js") + _resource(script), 1)
    return text.replace(_DATA, escape_script(json_text({**data, "page": {"runs": runs, "made": made}})), 1)


def _name_of(path: str) -> str:
    """Return the name by which people know a checkpoint: its run's folder and its iteration."""
    return "/".join([part for part in path.split("/") if part][-_NAMED_BY:]) or path


def _resource(name: str) -> str:
    return resources.files("mcore_ckpt_ext.cli").joinpath("pages").joinpath(name).read_text(encoding="utf-8")


def escape_script(text: str) -> str:
    """Escape JSON for a `script` element, so that it cannot end the element or begin a comment."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
