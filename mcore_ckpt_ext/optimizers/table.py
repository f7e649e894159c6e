"""The table of encodings; composes a checkpoint's optimizer of the states that each recognizes.

A new encoding is a module with its rows, and a line here.
"""

from __future__ import annotations

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.layout.local_model import LocalModels
from mcore_ckpt_ext.optimizers import bucket_formats, dp_zero, legacy_masters, model_space_formats
from mcore_ckpt_ext.optimizers.derived_masters import with_masters
from mcore_ckpt_ext.optimizers.optimizer_format import Encoding, Holder, StoredKeys, Version
from mcore_ckpt_ext.optimizers.state import OptimizerState
from mcore_ckpt_ext.optimizers.state_view import join_states
from mcore_ckpt_ext.optimizers.unsupported import check_provable

# Gradient buffers come last: they contain the parameters that no other encoding names.
ENCODINGS: tuple[Encoding, ...] = (
    *model_space_formats.ENCODINGS,
    *bucket_formats.ENCODINGS,
    *dp_zero.ENCODINGS,
    *legacy_masters.ENCODINGS,
)

FORMATS = tuple(encoding.name for encoding in ENCODINGS)
_JOINT = " + "


def encodings_named(name: str | None) -> list[Encoding]:
    """Return the rows of the encodings in a checkpoint's `optimizer_format`, ignoring unknown names."""
    parts = name.split(_JOINT) if name else []
    return [encoding for encoding in ENCODINGS if encoding.name in parts]


def unlabeled_format() -> str:
    """Return the name of the format of an optimizer that no label describes."""
    return next(encoding.name for encoding in ENCODINGS if encoding.is_unlabeled)


def legacy_format(*, distributed: bool) -> str:
    """Return the name of the format in legacy checkpoints."""
    return next(row.name for row in ENCODINGS if row.is_in_rank_files and row.distributed == distributed)


def portable_format(version: Version) -> str:
    """Return the name of the format that a release's Megatron loads under any layout."""
    rows = [row for row in ENCODINGS if row.is_portable and (row.labeled_by is None or row.labeled_by.is_of(version))]
    return max(rows, key=lambda row: row.labeled_by is not None).name


def saved_format(*, portable: bool) -> str:
    """Return the name of the format of a DistributedOptimizer of the newest release.

    Args:
        portable: whether it is saved with --dist-ckpt-optim-fully-reshardable.
    """
    return next(row.name for row in ENCODINGS if row.labeled_by is not None and row.is_portable == portable)


def may_be_shifted(name: str | None) -> bool:
    """Return True if Megatron itself may have written an optimizer format's parameters shifted."""
    return any(encoding.may_be_shifted for encoding in encodings_named(name))


def stock_can_load(name: str | None, placement_changed: bool, version: Version) -> bool:
    """Return whether Megatron itself loads an intact optimizer state correctly.

    Sources: `load_checkpoint` (megatron/training/checkpointing.py) and `DistributedOptimizer.load_state_dict` in each
    version.

    Args:
        name: the optimizer format.
        placement_changed: whether the gradient buffers of the running job differ from those of the job that wrote it.
        version: the version of megatron-core, (major, minor).
    """
    return all(
        (encoding.stock_loads is None or encoding.stock_loads.is_of(version))
        and not (encoding.needs_same_buffers and placement_changed)
        for encoding in encodings_named(name)
    )


def shows_names(name: str | None) -> bool:
    """Return whether the keys of an optimizer format's arrays identify parameters.

    Returns:
        False without an optimizer.
    """
    return name is not None and all(encoding.shows_names for encoding in encodings_named(name))


def opens_by_metadata(name: str) -> bool:
    """Return whether the content of an optimizer format can be listed without reading elements."""
    return not any(encoding.opening_reads_elements for encoding in encodings_named(name))


def recognize(keys: StoredKeys) -> list[tuple[Encoding, StoredKeys]]:
    """Return the encodings in a checkpoint, each with its keys."""
    claims = [(encoding, encoding.claims(keys)) for encoding in ENCODINGS]
    return [(encoding, keys.only(claimed)) for encoding, claimed in claims if claimed]


def format_name(keys: StoredKeys) -> str | None:
    """Return the names of all encodings in a checkpoint, or its label if there are none.

    Returns:
        None without state.
    """
    names = [encoding.name for encoding, _ in recognize(keys)]
    return _JOINT.join(names) or (keys.label if any(True for _ in keys) else None)


def open_optimizer(holder: Holder, keys: StoredKeys) -> OptimizerState:
    """Return the optimizer state of a torch_dist checkpoint.

    Args:
        holder: the checkpoint.
        keys: the stored state of its optimizers.

    Raises:
        UnsupportedCheckpointError: there is no state, or its format is not supported.
    """
    encodings = recognize(keys)
    if not encodings:
        raise UnsupportedCheckpointError(
            "this version does not support the format of the optimizer state",
            found=keys.label,
            expected=", ".join(FORMATS),
            where=str(holder.folder),
        )
    check_provable(holder, keys, [encoding.name for encoding, _ in encodings])
    states: list[OptimizerState] = []
    named: set[str] = set()

    def others() -> LocalModels:
        """Return the parameters that no array has named so far, which gradient buffers contain."""
        return holder.models().without(named)

    for encoding, claimed_keys in encodings:
        states.append(with_masters(encoding.read(holder, claimed_keys, others), holder.weights()))
        if encoding.shows_names:
            named |= set(states[-1].names())
    return join_states(states)
