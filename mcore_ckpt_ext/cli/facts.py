"""The options by which a user states what a checkpoint without Megatron's arguments does not say."""

from __future__ import annotations

import argparse
from dataclasses import fields

from mcore_ckpt_ext.cli.sizes import parse_count
from mcore_ckpt_ext.loops.facts import Facts

_NAMES = [field.name for field in fields(Facts)]


def add_facts(parser: argparse.ArgumentParser, prefix: str = "") -> None:
    """An option for each fact; `prefix` tells it from the option of the same name for the reader."""
    group = parser.add_argument_group("only for a checkpoint without Megatron's arguments: the job that wrote it")
    for name in _NAMES:
        what = name.removesuffix("_size").replace("_", "-")
        group.add_argument(
            f"--{prefix}{name.replace('_', '-')}", dest=f"fact_{name}", type=parse_count, metavar="N",
            help=f"its {what} size",
        )  # fmt: skip


def facts_of(arguments: argparse.Namespace) -> Facts:
    """What the user states.

    Raises:
        UsageError: a value makes no sense.
    """
    return Facts(**{name: getattr(arguments, f"fact_{name}") for name in _NAMES})
