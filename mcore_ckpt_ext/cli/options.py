"""Options that several commands have, and the options of an operation from a command line."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from mcore_ckpt_ext.cli.sizes import parse_count
from mcore_ckpt_ext.job.facts import NOTHING, Facts

if TYPE_CHECKING:
    from mcore_ckpt_ext.operations.options import Options

_Options = TypeVar("_Options", bound="Options")
_NAMES = [field.name for field in fields(Facts)]


def add_facts(parser: argparse.ArgumentParser, kind: type[Facts] = Facts) -> None:
    """Add an option for each size, with the prefix of this kind of facts."""
    parser.set_defaults(kind_of_facts=kind)
    options = kind()
    group = parser.add_argument_group("the job that wrote the checkpoint, if Megatron's arguments are missing from it")
    for name in _NAMES:
        dimension = name.removesuffix("_size").replace("_", "-")
        group.add_argument(
            options.option(name),
            dest=f"fact_{name}",
            type=parse_count,
            metavar="N",
            help=f"{dimension} size of that job",
        )


def add_weights(parser: argparse.ArgumentParser, of: str = "an optimizer-only checkpoint or a PEFT folder") -> None:
    """Add the option for the folder of external weights; `of` describes the checkpoint that lacks them."""
    parser.add_argument(
        "--weights",
        metavar="FOLDER",
        help=f"folder with the model weights for {of}: a Hugging Face folder or a checkpoint",
    )


def facts_of(arguments: argparse.Namespace) -> Facts:
    """Return the sizes that the user passed.

    Raises:
        UsageError: a value is invalid.
    """
    sizes = {name: getattr(arguments, f"fact_{name}") for name in _NAMES}
    kind: type[Facts] = arguments.kind_of_facts
    return kind(**sizes) if any(size is not None for size in sizes.values()) else NOTHING


def options_of(kind: type[_Options], arguments: argparse.Namespace, /, **derived: Any) -> _Options:
    """Return the options of an operation.

    Args:
        kind: the class of the options.
        arguments: the parsed command line; its attributes are options of the same name, and facts.
        **derived: options that are derived from other attributes.

    Raises:
        UsageError: a fact is invalid.
    """
    names = inspect.signature(kind).parameters
    given = {name: value for name, value in vars(arguments).items() if name in names}
    return kind(**{**given, "facts": facts_of(arguments), **derived})
