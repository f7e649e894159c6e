"""`mcore-ckpt convert --list-families`: the Hugging Face model families, and unsupported model types."""

from __future__ import annotations

import sys

from mcore_ckpt_ext.cli.output import line
from mcore_ckpt_ext.families.checked import checked_family
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.recognition import FAMILIES, installed_families
from mcore_ckpt_ext.families.unsupported import NOT_IN_MEGATRON

_HEAD = ("model_type", "family", "trained by", "since", "directions", "models (released ones that were checked)")


def print_families() -> None:
    """Print the table of families, including those of other installed distributions."""
    rows = [_HEAD, *map(_row, FAMILIES)]
    rows += [
        (family.model_type, family.class_name, "(not loaded)", "", "", f"registered by {family.distribution}")
        for family in installed_families()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    for row in rows:
        line("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]))
    line("since: the first release of Megatron Core with the arguments of such a model")
    line("directions: from Hugging Face to Megatron (import), and back (export)")
    line(f"not in Megatron Core up to 0.19.2: {', '.join(sorted(NOT_IN_MEGATRON))}")


def _row(family: Family) -> tuple[str, ...]:
    models = (sys.modules[type(family).__module__].__doc__ or "").partition("\n")[0].rstrip(".")
    spec = "Megatron (Transformer Engine)" if family.needs_engine else "Megatron"
    since, names = checked_family(family.model_type)
    models_and_names = f"{models} ({', '.join(names)})" if names else models
    trained_by = "Megatron-Bridge" if family.bridge_only_reason else spec
    return family.model_type, family.name, trained_by, since, "import, export", models_and_names
