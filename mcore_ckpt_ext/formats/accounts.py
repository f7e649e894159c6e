"""The account of a checkpoint, from which verdicts, text and JSON derive: the fate of each key."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from mcore_ckpt_ext.errors import join_some
from mcore_ckpt_ext.formats.unread_state import OTHER, UnreadState, merge_entries
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.model_space.tensors import STALE_MASTER, WEIGHT
from mcore_ckpt_ext.optimizers.stale_masters import WHY_STALE

_SHOWN = 3


@dataclass(frozen=True)
class Account:
    """The stored keys of a checkpoint by what was done with them; each is in exactly one class.

    Attributes:
        compared: the number of keys whose elements were read and compared or converted.
        by_form: the number of keys of which only name and shape were checked.
        not_looked_at: all other keys, with the reason; those of one left-out kind together. A key without a reason is
            unknown.
    """

    compared: int = 0
    by_form: int = 0
    not_looked_at: tuple[UnreadState, ...] = ()

    @property
    def unknown(self) -> tuple[UnreadState, ...]:
        """The unknown keys."""
        return tuple(item for item in self.not_looked_at if not item.why)

    @property
    def sentence(self) -> str:
        """The keys of model and optimizer, and the unknown ones, that were not looked at.

        A verdict ends with it. State that belongs to the ranks of a job, or that a model computes, is listed above it.
        """
        keys = [item.key for item in self.not_looked_at if item.kind != OTHER or not item.why]
        return f"not looked at: {join_some(keys, _SHOWN)}" if keys else ""


def account_of(
    checkpoint: CheckpointView,
    *,
    elements: bool = True,
    leaves_out: Callable[[str], bool] = lambda kind: False,
    why: str = "",
    described: Collection[str] = (),
) -> Account:
    """Return the account of a command that looked at all keys that this package reads.

    Args:
        checkpoint: the checkpoint.
        elements: whether elements were read; else only names and shapes were checked.
        leaves_out: returns whether the command left out a kind.
        why: the reason for which it did.
        described: keys of which nothing is read, and whose name and shape were checked nevertheless.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    unread = checkpoint.files.unread(objects=elements)
    names = {item.key for item in unread}
    left: dict[str, int] = {}
    stale: list[UnreadState] = []
    keys: dict[str, set[str]] = {}
    for parts in checkpoint.files.stored_parts():
        if names and not names.isdisjoint((parts.tensor, parts.tensor.rpartition("/shard_")[0])):
            continue
        if leaves_out(parts.kind):
            left[parts.kind] = left.get(parts.kind, 0) + sum(nbytes for _, nbytes in parts.places)
        elif parts.kind == STALE_MASTER:
            stale.append(UnreadState(parts.tensor, OTHER, sum(nbytes for _, nbytes in parts.places), WHY_STALE))
        else:
            keys.setdefault(parts.kind, set()).add(parts.tensor)
    known_by_form = sum(item.key in described for item in unread)
    objects = len(keys.pop(OTHER, ()))
    read = sum(map(len, keys.values()))
    kinds = (UnreadState(_label(kind), kind, nbytes, why) for kind, nbytes in left.items())
    return Account(
        compared=read if elements else 0,
        by_form=known_by_form + objects + (0 if elements else read),
        not_looked_at=(*(item for item in unread if item.key not in described), *merge_entries(stale), *kinds),
    )


def account_of_load(checkpoint: CheckpointView) -> Account:
    """Return the account of a resume, which reads all parameters of the model and of the optimizer.

    Only the index is looked at, so that every rank of a large job can call this.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    read = sum(len(checkpoint.names(kind)) for kind in checkpoint.kinds())
    return Account(compared=read, not_looked_at=tuple(checkpoint.files.unread(objects=False)))


def together(accounts: Iterable[Account]) -> Account:
    """Return the account of several checkpoints that are one source."""
    listed = list(accounts)
    return Account(
        sum(account.compared for account in listed),
        sum(account.by_form for account in listed),
        tuple(merge_entries(item for account in listed for item in account.not_looked_at)),
    )


def _label(kind: str) -> str:
    return "weights" if kind == WEIGHT else f"optimizer state {kind}"
