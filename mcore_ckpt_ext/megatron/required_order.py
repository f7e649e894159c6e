"""Refuses a load whose data does not go on in the same order, if the user requires that it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_ckpt_ext.continuity.order_change import DataOrder
from mcore_ckpt_ext.errors import ModelMismatchError
from mcore_ckpt_ext.settings import DATA_ORDER, REQUIRED


def check_required_order(order: DataOrder, arguments: Any, folder: Path) -> None:
    """Refuse a job if the user requires the order of its data, and that is another one or unknown.

    Args:
        order: the account of the data.
        arguments: Megatron's arguments; None in a loop that has none.
        folder: the checkpoint.

    Raises:
        ModelMismatchError: the user requires the same order.
    """
    if order.goes_on or DATA_ORDER.choose(arguments) != REQUIRED:
        return
    source = DATA_ORDER.name if arguments is None else DATA_ORDER.flag
    raise ModelMismatchError(
        "the data does not go on in the same order, or that is unknown",
        found=order.sentence,
        expected=f"the same order, as {source} {REQUIRED} demands",
        where=str(folder),
        hint=order.hint or None,
    )
