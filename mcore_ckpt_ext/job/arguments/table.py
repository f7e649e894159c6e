"""All rows of the table of Megatron's arguments."""

from __future__ import annotations

from mcore_ckpt_ext.job.arguments.model import ModelTable
from mcore_ckpt_ext.job.arguments.row import rows_of
from mcore_ckpt_ext.job.arguments.run import RunTable
from mcore_ckpt_ext.job.arguments.unread import UnreadTable

ROWS = rows_of(ModelTable, RunTable, UnreadTable)
"""The rows by the names of their arguments; arguments without a row are in `without_effect`, or are not known."""
