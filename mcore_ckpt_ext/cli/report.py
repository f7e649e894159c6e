"""Reports the result of a command: as a page, as JSON, or as tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from mcore_ckpt_ext.cli.json_output import print_result
from mcore_ckpt_ext.cli.output import message
from mcore_ckpt_ext.cli.page import write_page

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Result = TypeVar("Result", bound="DataclassInstance")


def report(
    arguments: argparse.Namespace,
    command: str,
    result: Result,
    *,
    page: Callable[[Result], str],
    show: Callable[[Result], None],
    exit_code: int = 0,
) -> int:
    """Write the page if `--html` is set, print the result as JSON or as tables, and return the exit code.

    Raises:
        DestinationError: the page cannot be written.
    """
    if arguments.html is not None:
        write_page(arguments.html, page(result))
        message(f"wrote {arguments.html}")
    if arguments.json:
        print_result(command, result, exit_code)
    else:
        show(result)
    return exit_code
