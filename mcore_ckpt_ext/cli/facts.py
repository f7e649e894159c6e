"""The options by which a user states what a checkpoint without Megatron's arguments does not say."""

from __future__ import annotations

import argparse
from dataclasses import fields

from mcore_ckpt_ext.cli.sizes import parse_count
from mcore_ckpt_ext.job.facts import NOTHING, Facts

_NAMES = [field.name for field in fields(Facts)]


def add_facts(parser: argparse.ArgumentParser, kind: type[Facts] = Facts) -> None:
    """An option for each fact, as this kind of them spells it."""
    parser.set_defaults(kind_of_facts=kind)
    options = kind()
    group = parser.add_argument_group("the job that wrote the checkpoint, if Megatron's arguments are missing from it")
    for name in _NAMES:
        what = name.removesuffix("_size").replace("_", "-")
        group.add_argument(
            options.option(name), dest=f"fact_{name}", type=parse_count, metavar="N",
            help=f"{what} size of that job",
        )  # fmt: skip


def add_weights(parser: argparse.ArgumentParser, of: str = "an optimizer-only checkpoint or a PEFT folder") -> None:
    """The option that names the folder of weights that lie elsewhere; `of`: what lacks them."""
    parser.add_argument(
        "--weights", metavar="FOLDER",
        help=f"folder with the model weights for {of}: a Hugging Face folder or a checkpoint",
    )  # fmt: skip


def facts_of(arguments: argparse.Namespace) -> Facts:
    """The user's description of the job.

    Raises:
        UsageError: a value makes no sense.
    """
    stated = {name: getattr(arguments, f"fact_{name}") for name in _NAMES}
    kind: type[Facts] = arguments.kind_of_facts
    return kind(**stated) if any(size is not None for size in stated.values()) else NOTHING
