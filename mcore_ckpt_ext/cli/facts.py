"""Options for the sizes of the job that wrote a checkpoint without Megatron's arguments."""

from __future__ import annotations

import argparse
from dataclasses import fields

from mcore_ckpt_ext.cli.sizes import parse_count
from mcore_ckpt_ext.job.facts import NOTHING, Facts

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
