"""Notes on a model's small files that a conversion copies: which are copied, which are not, which name code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mcore_ckpt_ext.errors import shortened, some
from mcore_ckpt_ext.formats.hugging_face.folder import json_of, refused_companions
from mcore_ckpt_ext.formats.view import CheckpointView

_CODE = "auto_map"
"""The key by which a JSON file names classes that transformers imports from the folder, or from another repository.

Source: `get_class_from_dynamic_module`, transformers/dynamic_module_utils.py, 4.36 to 5.23: with `trust_remote_code`.
"""


def companion_notes(taken: Mapping[str, bytes], checkpoint: CheckpointView) -> list[str]:
    """Notes on the small files that are copied along with a checkpoint, and on those that are not.

    Args:
        taken: the files that are copied, by name.
        checkpoint: the checkpoint that has them.
    """
    refused = refused_companions(checkpoint.folder, checkpoint.companions_below)
    found = [f"copied along with the weights: {', '.join(taken)}"] if taken else []
    found += _code_notes(taken)
    return found + [f"not copied: {name}: {why}" for name, why in refused.items()]


def _code_notes(taken: Mapping[str, bytes]) -> Iterator[str]:
    for name in taken:
        if name.endswith(".json") and (named := json_of(taken, name).get(_CODE)):
            yield (
                f"{name} names code ({_CODE}: {shortened(some(_names(named), 3))}), which is copied with it as a name "
                "only: nothing here runs it, and transformers imports it with trust_remote_code=True"
            )


def _names(named: object) -> list[str]:
    """The classes of an `auto_map`, which has a name, or a list of names, for each kind of class."""
    if isinstance(named, dict):
        return [name for value in named.values() for name in _names(value)]
    if isinstance(named, list):
        return [name for value in named for name in _names(value)]
    return [] if named is None else [str(named)]
